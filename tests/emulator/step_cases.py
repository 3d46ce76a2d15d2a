"""Models, recipes, levels and options of whole steps."""

from typing import Any, NamedTuple

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
"""Those of Hopper; mxfp8 is Blackwell's."""
LEVELS = ("O1", "O2", "O3")
KINDS = ("loss", "first grad", "last grad", "weight", "logits")
"""What is compared of a step."""
OPTIONS: dict[str, dict[str, Any]] = {
    "gradient release": {"opt_level": "O3", "gradient_release": True},
    "cached weights": {"cache_weights": True},
    "smooth SwiGLU": {"smooth_swiglu": True},
    "wgrad in BF16": {"wgrad": "bf16"},
}


class Case(NamedTuple):
    """What is trained, and how.

    Attributes:
        model: see `tests.emulator.step_models`.
        options: fields of `FP8Config`.
        capability: compute capability.
        first_batch: number of the first batch.
    """

    model: str
    options: dict[str, Any]
    capability: tuple[int, int] = (9, 0)
    first_batch: int = 0


def _cases() -> dict[str, Case]:
    """Return the cases by name: a recipe and a level or an option, behind a model but a Llama."""
    cases = {}
    for recipe in RECIPES:
        for level in LEVELS:
            cases[f"{recipe} {level}"] = Case("llama", {"recipe": recipe, "opt_level": level})
        for name, options in OPTIONS.items():
            cases[f"{recipe} {name}"] = Case("llama", {"recipe": recipe, **options})
    # In the first step on batch 0, a sum in another order moves an FP8 value of this case.
    cases["tensorwise O1"] = cases["tensorwise O1"]._replace(first_batch=10)
    for level in LEVELS:
        options = {"recipe": "mxfp8", "opt_level": level}
        cases[f"mxfp8 {level}"] = Case("llama", options, (10, 0))
    for model in ("biases", "gpt2", "lora"):
        for recipe in RECIPES:
            for level in LEVELS:
                options = {"recipe": recipe, "opt_level": level}
                cases[f"{model}, {recipe} {level}"] = Case(model, options)
    for recipe in ("blockwise", "tensorwise"):
        options = {"recipe": recipe, "merge_aware": True}
        cases[f"lora, {recipe} merge-aware"] = Case("lora", options)
    return cases


CASES = _cases()
