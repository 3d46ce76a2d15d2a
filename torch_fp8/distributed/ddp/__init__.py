"""Gradients that DistributedDataParallel exchanges in FP8."""
