"""Helpers of autograd functions, and checkpoints that keep FP8 tensors."""
