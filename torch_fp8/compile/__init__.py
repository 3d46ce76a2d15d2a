"""Passes over what `torch.compile` traces, so that casts fuse into their producers."""
