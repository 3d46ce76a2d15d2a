"""Analysis of a model on its own tokens before a run: a recipe for each layer, with reasons."""
