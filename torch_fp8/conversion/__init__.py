"""A model that becomes FP8: selection, fused layers, recipes, reports."""
