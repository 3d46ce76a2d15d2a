"""Checkpoints: FP8 ones loaded, and trained models exported for inference engines."""
