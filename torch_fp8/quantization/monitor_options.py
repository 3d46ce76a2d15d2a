"""The monitor's options in a configuration, and a check of their combinations."""

from typing import Any

from torch_fp8.quantization.option_values import given
from torch_fp8.quantization.recipe import RECIPES

PROBES = ("clip_search", "logit_sharpness")
ON_ALARM = ("warn", "bf16", *RECIPES)
ON_LOSS_SPIKE = ("warn", "skip", "bf16", "restore")


def check_monitor(config: Any) -> None:
    """Check that the monitor's options do not contradict each other or other options.

    Args:
        config: FP8Config whose values are each valid by themselves.
    Raises:
        ValueError: options contradict each other; the message names them and a solution.
    """
    names = given(config, "monitor")
    if names and not config.monitor:
        raise ValueError(
            f"FP8Config: {', '.join(names)} need statistics; set monitor=100, or leave them out"
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
            "FP8Config: monitor is not supported by Transformer Engine, which casts internally; "
            "leave that out, or backend"
        )
