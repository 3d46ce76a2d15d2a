"""Timings of a linear layer's forward and backward on this device, in FP8 and without.

They time `Float8Linear` and ``nn.Linear`` as in training, for one of several micro-batches. Each
pass casts its operands, except payloads or scales of the weight that are kept between optimizer
steps, and every input needs a gradient. Legend: M tokens, K in, N out.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.config import FP8Config
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.payload_cast import PayloadCast
from torch_fp8.tensor.split_weight import split_parameter

WARMUP, REPETITIONS = 1, 5
CYCLES = 2e9
"""Largest clock rate of a card, in cycles per second."""
LONGEST_LAUNCH = 0.02
"""Upper bound in seconds for the launch of a pass; only the first, which compiles, takes longer."""


class LayerShape(NamedTuple):
    """What the time of a linear layer depends on, besides the number of tokens.

    Attributes:
        out_features, in_features: N and K, on this rank.
        bias: whether the layer has a bias.
        dtype: dtype of the GEMMs without FP8, bfloat16 or float16.
    """

    out_features: int
    in_features: int
    bias: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.out_features}x{self.in_features}"


Kept = bool | None
"""What a weight keeps between optimizer steps: nothing (None), its amax (False), or its payload."""


def kept_weights(config: FP8Config) -> Kept:
    """Return what layers cache of float32 weights under `config`, or None if weights stay plain."""
    return config.cache_weights is True if config.keeps_residuals else None


class LayerTimes(NamedTuple):
    """Median seconds of a forward and backward: without FP8, and by the name of each recipe."""

    plain: float
    fp8: dict[str, float]


@dataclass(frozen=True)
class TimedPass:
    """A forward and backward of a layer, which a call runs without storing gradients.

    Attributes:
        layer: linear layer with random parameters.
        recipe: the layer's recipe, or None without FP8.
        x: its input, which requires a gradient.
        grad_output: gradient of its output.
    """

    layer: nn.Module
    recipe: Recipe | None
    x: Tensor
    grad_output: Tensor

    def __call__(self) -> None:
        inputs = [self.x, *(p for p in self.layer.parameters() if p.requires_grad)]
        torch.autograd.grad(self.layer(self.x), inputs, self.grad_output)


@functools.cache
def layer_times(
    device: torch.device,
    shape: LayerShape,
    tokens: int,
    recipes: tuple[Recipe, ...],
    kept: Kept = None,
) -> LayerTimes:
    """Time one layer with each of `recipes` and without FP8, in turns; cached in this process.

    This needs memory for one layer's forward and backward and its cached payloads. It does not
    change random states, autocast or gradient modes.

    Args:
        device: the device to time on.
        shape: shape of the layer.
        tokens: M, the number of tokens.
        recipes: recipes that the card runs natively.
        kept: cached parts of the weight, see `kept_weights`.
    """
    with (  # gradients and no autocast, whatever the caller's modes
        _disable_current_modes(),
        torch.inference_mode(False),  # also enables gradients
        torch.autocast(device.type, enabled=False),
    ):
        taken = samples(device, _passes(device, shape, tokens, recipes, kept))
    plain, *fp8 = (statistics.median(times) for times in taken)
    return LayerTimes(plain, {r.name: time for r, time in zip(recipes, fp8, strict=True)})


def seconds(device: torch.device, run: Callable[[], None]) -> float:
    """Measure the seconds of one call of `run` on a CUDA device, without the time of its launch.

    The host launches a single layer more slowly than the device runs it. In a model, attention, the
    loss and longer layers hide that, and a compiled model launches at once. So the device sleeps
    here until the call is launched.
    """
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        run()
        host = min(time.perf_counter() - began, LONGEST_LAUNCH)
        torch.cuda._sleep(int(2 * host * CYCLES))
        start.record()
        run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def samples(device: torch.device, passes: Sequence[Callable[[], None]]) -> list[list[float]]:
    """Measure the seconds of `passes` in turns, so that changing clocks affect all of them."""
    taken: list[list[float]] = [[] for _ in passes]
    for repetition in range(-WARMUP, REPETITIONS):
        for run, times in zip(passes, taken, strict=True):
            duration = seconds(device, run)
            if repetition >= 0:
                times.append(duration)
    return taken


def _passes(
    device: torch.device, shape: LayerShape, tokens: int, recipes: Sequence[Recipe], kept: Kept
) -> list[TimedPass]:
    generator = torch.Generator(device).manual_seed(0)  # leaves torch's default generator alone

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=shape.dtype)

    num_out, num_in = shape.out_features, shape.in_features
    plain = nn.Parameter(random(num_out, num_in).mul_(num_in**-0.5))
    bias = nn.Parameter(random(num_out)) if shape.bias else None
    x, grad = random(tokens, num_in).requires_grad_(), random(tokens, num_out)
    return [TimedPass(_layer(plain, bias, r, kept), r, x, grad) for r in (None, *recipes)]


def _layer(
    weight: nn.Parameter, bias: nn.Parameter | None, recipe: Recipe | None, kept: Kept
) -> nn.Linear:
    num_out, num_in = weight.shape
    layer = nn.Linear(num_in, num_out, bias=bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias
    if recipe is not None:
        cls: Any = Float8Linear
        layer.__class__ = cls
        assert isinstance(layer, Float8Linear)
        layer.configure(f"{num_out}x{num_in}", FP8Config(), recipe, emulate=False)
        if kept is not None:
            split = split_parameter(nn.Parameter(weight.detach().float()))
            layer.weight, cast = split, PayloadCast(recipe.weight)
            if cast.needs_amax:
                split.halves.keep_amax()
            if kept:
                split.halves.keep_payload(cast)  # filled by the warm-up pass
    return layer
