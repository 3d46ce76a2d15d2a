"""FP8 formats, recipes, scales, block scales and stochastic rounding: numbers, no modules."""
