"""Triton kernels: one file per module that they serve, of the same stem, over `rounding`.

Nothing else imports Triton, and nothing imports this before a CUDA tensor arrives.
"""
