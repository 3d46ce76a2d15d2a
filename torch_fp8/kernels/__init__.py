"""This package holds the Triton kernels. The launches are in one file per module that they serve,
of the same stem; the kernels themselves are in files of tiles, over what they share: rounding,
codecs, random bits.

Nothing else imports Triton, and nothing imports this before a CUDA tensor arrives.
"""
