"""Conversion of a model to FP8: selection, fused layers, recipes, reports."""
