"""What a model's own tokens say of FP8 before a run: a recipe for each layer, with reasons."""
