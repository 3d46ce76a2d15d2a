"""Tensors that are, or will be, FP8; and how an operand is cast."""
