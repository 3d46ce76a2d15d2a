"""What `torch.compile` is given, so that casts fuse into their producers."""
