"""Rules for tracing by `torch.compile`, which fuse casts into their producers."""
