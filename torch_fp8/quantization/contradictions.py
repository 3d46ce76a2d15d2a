"""Options of `torch_fp8.FP8Config` that exclude each other, and choices of the monitor."""

from typing import Any

from torch_fp8.quantization.option_values import given
from torch_fp8.quantization.recipe import E4M3_ONLY, RECIPES, SAVE_FORMATS

PROBES = ("clip_search", "logit_sharpness")
ON_ALARM = ("warn", "bf16", *RECIPES)
ON_LOSS_SPIKE = ("warn", "skip", "bf16", "restore")


def check_contradictions(config: Any) -> None:
    """Raise ValueError if options of an `FP8Config` exclude each other.

    Args:
        config: configuration whose options are each valid by themselves.
    """
    for recipe in ("auto", "delayed"):
        names = given(config, recipe)
        if names and config.recipe != recipe:
            raise ValueError(
                f"FP8Config: only recipe={recipe!r} takes {', '.join(names)}, but recipe is "
                f"{config.recipe!r}; name recipe={recipe!r}, or leave that out"
            )
    if config.grad_format == "e5m2" and config.recipe in E4M3_ONLY:
        raise ValueError(
            f"FP8Config: recipe={config.recipe!r} takes gradients in E4M3 only (torch's "
            "block-scaled GEMMs multiply E4M3 with E4M3); leave grad_format out"
        )
    if config.cache_weights and config.recipe == "delayed":
        raise ValueError(
            "FP8Config: cache_weights=True needs scales computed from the weight itself; "
            "recipe='delayed' takes them from a history that changes with every forward; leave one "
            "of them out"
        )
    recipes = SAVE_FORMATS.get(config.save_format or "", ())
    if config.save_format is not None and config.recipe not in ("auto", *recipes):
        others = [name for name, able in SAVE_FORMATS.items() if config.recipe in able]
        raise ValueError(
            f"FP8Config: save_format={config.save_format!r} cannot express "
            f"recipe={config.recipe!r}; use recipe={recipes[0]!r}, or save_format={others[0]!r}"
        )
    optimizer = given(config, "optimizer")
    if optimizer and config.opt_level == "O1":
        raise ValueError(
            f"FP8Config: opt_level='O1' leaves the optimizer unchanged, so it excludes "
            f"{', '.join(optimizer)}; use opt_level='O2' or 'O3', or leave that out"
        )
    if config.opt_level == "O1" and (config.frozen_weights == "fp8" or config.merge_aware):
        name, value = ("merge_aware", True) if config.merge_aware else ("frozen_weights", "fp8")
        raise ValueError(
            f"FP8Config: {name}={value!r} stores weights in FP8, but opt_level='O1' leaves weights "
            f"unchanged; use opt_level='O2' or 'O3', or leave {name} out"
        )
    if config.merge_aware and (config.frozen_weights == "keep" or not config.eval_fp8):
        other = "eval_fp8=False" if not config.eval_fp8 else "frozen_weights='keep'"
        raise ValueError(
            "FP8Config: merge_aware=True always runs merged weights in FP8 over a base stored in "
            f"FP8; leave out {other} or merge_aware"
        )
    if config.wgrad == "bf16" and "wgrad" in config.fast_accum:
        raise ValueError(
            "FP8Config: fast_accum names 'wgrad', but wgrad='bf16' runs that GEMM in high "
            "precision; leave one of them out"
        )
    if config.backend == "transformer-engine":
        _check_transformer_engine(config)
    _check_monitor(config)


def _check_transformer_engine(config: Any) -> None:
    if config.recipe == "rowwise":
        raise ValueError(
            "FP8Config: Transformer Engine has no recipe with one scale per row; use "
            "recipe='tensorwise', 'delayed', 'blockwise' or 'mxfp8', or leave backend out"
        )
    names = given(config, "torch")
    if config.recipe == "delayed" and config.amax_history_len == 1:
        names.append("amax_history_len=1")
    if names:
        raise ValueError(
            f"FP8Config: Transformer Engine does not support {', '.join(names)}; remove "
            "these options, or backend"
        )


def _check_monitor(config: Any) -> None:
    names = given(config, "monitor")
    if names and not config.monitor:
        raise ValueError(
            f"FP8Config: without monitor there are no statistics for {', '.join(names)}; set "
            "monitor=100, or leave that out"
        )
    if config.on_alarm == config.recipe:
        raise ValueError(
            f"FP8Config: on_alarm={config.on_alarm!r} is the recipe that all layers already run; "
            "choose a finer one, or on_alarm='bf16'"
        )
    if config.on_alarm in RECIPES and config.cache_weights:
        raise ValueError(
            f"FP8Config: on_alarm={config.on_alarm!r} casts weights differently from "
            "cache_weights; leave cache_weights out, or use on_alarm='bf16'"
        )
    if config.on_loss_spike in ("skip", "restore") and config.gradient_release:
        raise ValueError(
            f"FP8Config: on_loss_spike={config.on_loss_spike!r} skips a step, but with "
            "gradient_release=True weights are updated in backward; leave one of them out"
        )
    if config.monitor and config.backend == "transformer-engine":
        raise ValueError(
            "FP8Config: Transformer Engine casts internally and does not support monitor; "
            "remove monitor, or backend"
        )
