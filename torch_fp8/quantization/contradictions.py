"""Options of `torch_fp8.FP8Config` that exclude each other, and choices of the monitor."""

import sys
from collections.abc import Container, Iterator
from typing import Any

from torch_fp8.quantization.option_values import given
from torch_fp8.quantization.recipe import E4M3_ONLY, RECIPES, SAVE_FORMATS

PROBES = ("clip_search", "logit_sharpness")
ON_ALARM = ("warn", "bf16", *RECIPES)
_TE = ("transformer-engine",)
_OTHERS = tuple(name for name in RECIPES if name != "tensorwise")
_OWNERS: tuple[tuple[str, str, Container[object], object], ...] = (
    ("auto", "recipe", ("auto",), "auto"),
    ("delayed", "recipe", ("delayed",), "delayed"),
    ("optimizer", "opt_level", ("O2", "O3"), "O2"),
    ("torch", "backend", ("torch",), "torch"),
    ("monitor", "monitor", range(1, sys.maxsize), 100),
)
"""A group of options as in `option(of=...)`, its owner, the owner's values with which they apply,
and the value to suggest.
"""
_PAIRS: tuple[tuple[str, tuple[object, ...], str, tuple[object, ...], str], ...] = (
    ("recipe", E4M3_ONLY, "grad_format", ("e5m2",), "it takes gradients in E4M3 only"),
    ("recipe", _OTHERS, "graph_scales", ("last_step",), "it is for layers with tensorwise"),
    ("opt_level", ("O1",), "cache_weights", (True,), "O1 leaves weights unchanged"),
    ("opt_level", ("O1",), "frozen_weights", ("fp8",), "O1 leaves weights unchanged"),
    ("opt_level", ("O1",), "merge_aware", (True,), "O1 leaves weights unchanged"),
    ("merge_aware", (True,), "frozen_weights", ("keep",), "it merges into a base stored in FP8"),
    ("merge_aware", (True,), "eval_fp8", (False,), "merged weights always run in FP8"),
    ("merge_aware", (True,), "bf16_last", (), "merged weights always run in FP8"),
    ("on_alarm", RECIPES, "cache_weights", (True,), "that recipe casts weights differently"),
    ("backend", _TE, "cache_weights", (True,), "it casts weights itself"),
    ("backend", _TE, "recipe", ("rowwise",), "it has tensorwise, delayed, blockwise and mxfp8"),
    ("backend", _TE, "amax_history_len", (1,), "its histories are longer"),
)
"""An option and some of its values, another option and values that they exclude (if none are given,
all true ones), and the reason.
"""


def check_contradictions(config: Any) -> None:
    """Raise ValueError if options of an `FP8Config` exclude each other.

    Args:
        config: configuration whose options are each valid by themselves.
    """
    for text in _contradictions(config):
        raise ValueError(f"FP8Config: {text}")


def _contradictions(config: Any) -> Iterator[str]:
    for group, owner, valid, instead in _OWNERS:
        names, value = given(config, group), getattr(config, owner)
        if names and value not in valid:
            yield (
                f"{owner}={value!r} excludes {', '.join(names)}; use {owner}={instead!r}, or leave "
                "that out"
            )
    for one, values, other, excluded, reason in _PAIRS:
        x, y = getattr(config, one), getattr(config, other)
        if x in values and (y in excluded if excluded else y):
            yield f"{one}={x!r} excludes {other}={y!r}: {reason}; leave one of them out"
    recipes = SAVE_FORMATS.get(config.save_format, ("auto",))
    if config.save_format and config.recipe not in ("auto", *recipes):
        others = [name for name, able in SAVE_FORMATS.items() if config.recipe in able]
        yield (
            f"save_format={config.save_format!r} cannot express recipe={config.recipe!r}; use "
            f"recipe={recipes[0]!r}, or save_format={others[0]!r}"
        )
    if config.wgrad == "bf16" and "wgrad" in config.fast_accum:
        yield "wgrad='bf16' excludes fast_accum=('wgrad',): that GEMM is no FP8 GEMM; leave one out"
    if config.on_alarm == config.recipe:
        yield (
            f"on_alarm={config.on_alarm!r} is the recipe that all layers already run; choose a "
            "finer one, or on_alarm='bf16'"
        )
