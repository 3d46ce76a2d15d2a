"""Tensors stored in or cast to FP8, and the quantizers that cast operands."""
