"""FP8 formats, recipes, scales and stochastic rounding: arithmetic without modules."""
