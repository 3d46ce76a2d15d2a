"""FP8 exchange of activations for tensor and sequence parallelism."""
