"""Loading of FP8 checkpoints, and export of trained models for inference engines."""
