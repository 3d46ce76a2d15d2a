"""Precision as a schedule: `set_forward_precision`, and the step at which hosts call it."""

import weakref
from dataclasses import replace
from typing import Any

from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.suggestions import suggestion

PRECISIONS = ("fp8", "bf16")


def set_forward_precision(model: nn.Module, precision: str) -> int:
    """Run the forward products of a converted model in BF16 from now on, or in FP8 again.

    Backward, the optimizer and what autograd saves stay as they are, so neither memory nor the
    optimizer's states change. Call it between two optimizer steps. It also sets the forwards of
    evaluation and generation. torch.compile compiles each graph once more. Layers whose weights are
    stored in FP8 only stay in FP8: they have no other weights.

    Args:
        model: model that `convert_to_float8` converted, or a part of it.
        precision: ``bf16`` or ``fp8``.
    Returns:
        The number of layers that run their forward in `precision` now.
    Raises:
        ValueError: `precision` is unknown, no layer is in FP8, or no layer can run in BF16.
        TypeError: `model` is not a module.
    """
    check_arguments(set_forward_precision, locals())
    if precision not in PRECISIONS:
        raise ValueError(
            f"set_forward_precision(precision={precision!r}): valid are 'fp8' and 'bf16'"
            f"{suggestion(precision, PRECISIONS)}"
        )
    layers = [m for m in model.modules() if isinstance(m, (Float8Layer, Float8Experts))]
    if not layers:
        raise ValueError(
            "set_forward_precision: the model has no FP8 layer; call torch_fp8.convert_to_float8("
            "model, config) first, and pass the converted model"
        )
    switched = [layer for layer in layers if _can_switch(layer)]
    if not switched and precision == "bf16":
        raise ValueError(
            "set_forward_precision: no layer can run its forward in BF16, because all weights are "
            "stored in FP8 only, or Transformer Engine runs them; leave bf16_last out, or keep the "
            "base in BF16 with FP8Config(frozen_weights='keep')"
        )
    for layer in switched:
        recipe = replace(layer.fp8.recipe, bf16_forward=precision == "bf16")
        if recipe != layer.fp8.recipe:
            layer.run_forward(recipe)
    return len(switched) if precision == "bf16" else len(layers)


def _can_switch(layer: Any) -> bool:
    return layer.fp8.frozen is None and layer.fp8.config.backend == "torch"


class LastSteps:
    """The last steps of a run, whose forward is in BF16.

    A resumed run needs no state, because the precision follows from the step.

    Args:
        model: converted model.
        share: `FP8Config.bf16_last`.
        steps: number of the run's optimizer steps.
    """

    def __init__(self, model: nn.Module, share: float, steps: int) -> None:
        self._model = weakref.ref(model)
        self.steps, self.first = steps, steps - max(1, round(share * steps))
        self._precision = ""

    def before(self, step: int) -> None:
        """Set the precision of a step's forwards.

        Args:
            step: number of optimizer steps that are done.
        """
        precision, model = PRECISIONS[step >= self.first], self._model()
        if precision != self._precision and model is not None:
            set_forward_precision(model, precision)
            self._precision = precision

    def __str__(self) -> str:
        return (
            f"FP8: the forward runs in BF16 from step {self.first + 1} of {self.steps} on, and "
            "backward in FP8"
        )


def unscheduled(config: FP8Config) -> FP8Config:
    """Return a configuration for `convert_to_float8` by code that knows the number of steps."""
    return replace(config, bf16_last=0.0) if config.bf16_last else config


def refuse_share(config: FP8Config, loop: str) -> None:
    """Raise ValueError if `bf16_last` is a share of an unknown number of steps.

    Args:
        config: configuration of the run.
        loop: name of what does not know the number.
    """
    if config.bf16_last:
        raise ValueError(
            f"FP8Config(bf16_last={config.bf16_last}) is a share of the run's steps, and {loop} "
            "does not know how many there are; leave it out and call torch_fp8."
            "set_forward_precision(model, 'bf16') before the last of them (Lightning's Trainer and "
            "transformers' Trainer do this by themselves)"
        )
