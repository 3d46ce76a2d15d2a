"""FP8 layers and what they are made of."""
