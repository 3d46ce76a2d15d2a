"""Triton kernels: the launches in one file per module that they serve, of the same stem; what runs
on the card in `tiles`, over `rounding`.

Nothing else imports Triton, and nothing imports this before a CUDA tensor arrives.
"""
