"""Activations that tensor and sequence parallelism exchange in FP8."""
