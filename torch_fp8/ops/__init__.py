"""The operators ``torch_fp8::*``, each with its reference, and the scaled matmul."""
