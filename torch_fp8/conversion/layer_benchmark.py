"""Timings of linear layers' forward and backward on this device, in FP8 and without.

They time `Float8Linear` and ``nn.Linear`` as in training, for one of several micro-batches. Each
pass casts its operands, except payloads or scales of the weight that are kept between optimizer
steps, and every input needs a gradient. Layers that read the same input are timed together: they
share its cast, and the GEMMs of backward where `torch_fp8.nn.input_group` can join them.
Legend: M tokens, K in, N out.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.config import FP8Config
from torch_fp8.nn.input_group import InputGroup, can_group
from torch_fp8.nn.layer_norm import shared
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.halves import PayloadCast
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


Readers = tuple[LayerShape, ...]
"""The shapes of layers that read the same input; a layer alone is a tuple of one."""


class LayerTimes(NamedTuple):
    """Median seconds of a forward and backward: without FP8, and by the name of each recipe."""

    plain: float
    fp8: dict[str, float]


@dataclass(frozen=True)
class TimedPass:
    """A forward and backward of layers with one input, which a call runs without storing gradients.

    Attributes:
        layers: linear layers with random parameters.
        recipe: the layers' recipe, or None without FP8.
        x: their input, which requires a gradient.
        grad_outputs: gradient of each layer's output.
        group: group of the layers, or None; they refer to it weakly.
    """

    layers: tuple[nn.Module, ...]
    recipe: Recipe | None
    x: Tensor
    grad_outputs: tuple[Tensor, ...]
    group: InputGroup | None = None

    def __call__(self) -> None:
        parameters = [p for layer in self.layers for p in layer.parameters() if p.requires_grad]
        x = self.x
        if self.recipe is not None and len(self.layers) > 1:
            x = shared(x, "input")  # cast once
        outputs = [layer(x) for layer in self.layers]
        torch.autograd.grad(outputs, [self.x, *parameters], self.grad_outputs)


@functools.cache
def layer_times(
    device: torch.device,
    shapes: Readers,
    tokens: int,
    recipes: tuple[Recipe, ...],
    kept: Kept = None,
) -> LayerTimes:
    """Time layers with each of `recipes` and without FP8, in turns; cached in this process.

    This needs memory for the layers' forward and backward and their cached payloads. It does not
    change random states, autocast or gradient modes.

    Args:
        device: the device to time on.
        shapes: shapes of the layers that read one input.
        tokens: M, the number of tokens.
        recipes: recipes that the card runs natively.
        kept: cached parts of the weights, see `kept_weights`.
    """
    with (  # gradients and no autocast, whatever the caller's modes
        _disable_current_modes(),
        torch.inference_mode(False),  # also enables gradients
        torch.autocast(device.type, enabled=False),
    ):
        taken = samples(device, _passes(device, shapes, tokens, recipes, kept))
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
    taken = [[seconds(device, run) for run in passes] for _ in range(WARMUP + REPETITIONS)]
    return [list(times) for times in zip(*taken[WARMUP:], strict=True)]


def _passes(
    device: torch.device, shapes: Readers, tokens: int, recipes: Sequence[Recipe], kept: Kept
) -> list[TimedPass]:
    generator = torch.Generator(device).manual_seed(0)  # leaves torch's default generator alone
    dtype, num_in = shapes[0].dtype, shapes[0].in_features

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    def parameters(num_out: int, bias: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
        weight = nn.Parameter(random(num_out, num_in).mul_(num_in**-0.5))
        return weight, nn.Parameter(random(num_out)) if bias else None

    plain = [parameters(shape.out_features, shape.bias) for shape in shapes]
    x = random(tokens, num_in).requires_grad_()
    grads = tuple(random(tokens, shape.out_features) for shape in shapes)

    def timed(recipe: Recipe | None) -> TimedPass:
        layers = tuple(_layer(weight, bias, recipe, kept) for weight, bias in plain)
        if len(shapes) < 2 or recipe is None:
            return TimedPass(layers, recipe, x, grads)
        joins = all(can_group(recipe, shape.out_features) for shape in shapes)
        return TimedPass(layers, recipe, x, grads, InputGroup(layers) if joins else None)

    return [timed(recipe) for recipe in (None, *recipes)]


def _layer(
    weight: nn.Parameter, bias: nn.Parameter | None, recipe: Recipe | None, kept: Kept
) -> nn.Linear:
    num_out, num_in = weight.shape
    layer = nn.Linear(num_in, num_out, bias=bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias
    if recipe is not None:
        layer.__class__ = Float8Linear
        layer.configure(f"{num_out}x{num_in}", FP8Config(), recipe, emulate=False)
        if kept is not None:
            split = split_parameter(nn.Parameter(weight.detach().float()))
            layer.weight, cast = split, PayloadCast(recipe.weight)
            if cast.needs_amax:
                split.halves.keep_amax()
            if kept:
                split.halves.keep_payload(cast)  # filled by the warm-up pass
    return layer
