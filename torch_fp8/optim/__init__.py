"""Optimizers with 8-bit states and split master weights."""
