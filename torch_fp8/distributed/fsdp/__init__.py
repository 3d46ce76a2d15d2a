"""Weights and gradients that FSDP2 gathers and scatters in FP8."""
