"""Recipes, levels and options of whole steps."""

from typing import Any

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
OPTIONS: dict[str, dict[str, Any]] = {
    "gradient release": {"opt_level": "O3", "gradient_release": True},
    "cached weights": {"cache_weights": "both"},
    "smooth SwiGLU": {"smooth_swiglu": True},
    "wgrad in BF16": {"wgrad": "bf16"},
    "4-bit residual": {"opt_level": "O3", "residual_bits": 4},
}
CASES = {
    **{
        f"{r} {level}": {"recipe": r, "opt_level": level}
        for r in RECIPES
        for level in ("O1", "O2", "O3")
    },
    **{
        f"{r} {name}": {"recipe": r, **options}
        for r in RECIPES
        for name, options in OPTIONS.items()
    },
}
