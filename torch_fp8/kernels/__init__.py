"""Triton kernels, one file per module that they serve, same stem. Nothing else imports Triton."""
