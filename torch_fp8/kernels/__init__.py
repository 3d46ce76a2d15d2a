"""Triton kernels: the launches in one file per module that they serve, of the same stem; what runs
on the card in files of tiles, over what they share: rounding, codecs, random bits.

Nothing else imports Triton, and nothing imports this before a CUDA tensor arrives.
"""
