"""Precision as a schedule: `set_forward_precision`, and the step at which hosts call it."""

import weakref
from dataclasses import replace
from typing import Any

from torch import nn

from torch_fp8.config import FP8Config
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.quantization.wording import suggestion

PRECISIONS = ("fp8", "bf16")
_ALL_FROZEN = (
    "no layer can run its forward in BF16, because all weights are stored in FP8 only, or "
    "Transformer Engine runs them; leave bf16_last out, or keep the base in BF16 with "
    "FP8Config(frozen_weights='keep')"
)


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
    layers, switched = _layers(model)
    if not layers:
        raise ValueError(
            "set_forward_precision: the model has no FP8 layer; call torch_fp8.convert_to_float8("
            "model, config) first, and pass the converted model"
        )
    if not switched and precision == "bf16":
        raise ValueError(f"set_forward_precision: {_ALL_FROZEN}")
    in_bf16 = precision == "bf16"
    for layer in switched:
        if layer.fp8.recipe.bf16_forward != in_bf16:
            layer.run_forward(replace(layer.fp8.recipe, bf16_forward=in_bf16))
    return len(switched) if in_bf16 else len(layers)


def _layers(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the FP8 layers of a model, and those of them that can run their forward in BF16."""
    layers = [m for m in model.modules() if isinstance(m, (Float8Layer, Float8Experts))]
    torchs = [layer for layer in layers if layer.fp8.config.backend == "torch"]
    return layers, [layer for layer in torchs if layer.fp8.frozen is None]


class LastSteps:
    """The last steps of a run, whose forward is in BF16.

    A resumed run needs no state, because the precision follows from the step.

    Args:
        model: converted model.
        share: `FP8Config.bf16_last`.
        steps: number of the run's optimizer steps.
    Raises:
        ValueError: there are FP8 layers, and none can run its forward in BF16.
    """

    def __init__(self, model: nn.Module, share: float, steps: int) -> None:
        layers, switched = _layers(model)
        if layers and not switched:
            raise ValueError(f"FP8Config(bf16_last={share}): {_ALL_FROZEN}")
        self._counts = len(switched), len(layers)  # none if no layer is faster in FP8
        self._model = weakref.ref(model)
        self.steps, self.first = steps, steps - max(1, round(share * steps))
        self._was_last: bool | None = None

    def before(self, step: int) -> None:
        """Set the precision of a step's forwards.

        Args:
            step: number of optimizer steps that are done.
        """
        is_last, model = step >= self.first, self._model()
        # Set it again in each of the last steps, because a conversion returns layers to FP8.
        if model is not None and any(self._counts) and (is_last or self._was_last is not False):
            set_forward_precision(model, PRECISIONS[is_last])
            self._was_last = is_last

    def __str__(self) -> str:
        switched, layers = self._counts
        rest = "" if switched == layers else "; weights stored in FP8 only stay in FP8"
        return (
            f"FP8: the forward runs in BF16 from step {self.first + 1} of {self.steps} on, and "
            f"backward in FP8, in {switched} of {layers} layers{rest}"
        )


def unscheduled(config: FP8Config) -> FP8Config:
    """Return a configuration for `convert_to_float8` by code that knows the number of steps."""
    return replace(config, bf16_last=0.0) if config.bf16_last else config


def refuse_share(config: FP8Config, loop: str) -> None:
    """Raise ValueError if `bf16_last` is a share of an unknown number of steps.

    Args:
        config: configuration of the run.
        loop: name of the training loop or function that does not know the number.
    """
    if config.bf16_last:
        raise ValueError(
            f"FP8Config(bf16_last={config.bf16_last}) is a share of the run's steps, and {loop} "
            "does not know how many there are; leave it out and call torch_fp8."
            "set_forward_precision(model, 'bf16') before the last of them (Lightning's Trainer and "
            "transformers' Trainer do this by themselves)"
        )
