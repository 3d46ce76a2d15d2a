"""Helpers for autograd functions, and checkpoints that keep FP8 tensors."""
