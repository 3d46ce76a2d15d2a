"""Timings of a linear layer's forward and backward on the device at hand, in FP8 and without.

The layers timed are `Float8Linear` and ``nn.Linear`` as training calls them for one micro-batch of
several: operands are cast in each pass, but for what is kept of the weight from one optimizer step
to the next, and every input takes a gradient. Legend: M tokens, K in, N out.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.config import FP8Config
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.payload_cache import keeps_scale
from torch_fp8.tensor.split_weight import split_parameter

WARMUP, REPETITIONS = 1, 5
CYCLES = 2e9
"""The cycles of a card in a second, at most."""
LONGEST_LAUNCH = 0.02
"""The seconds that the host takes for a pass, at most, but for the first one, which compiles."""


class LayerShape(NamedTuple):
    """What the time of a linear layer depends on, beside the number of tokens.

    Attributes:
        out_features, in_features: N and K, on this rank.
        bias: whether it has one.
        dtype: the dtype of the product without FP8, bfloat16 or float16.
    """

    out_features: int
    in_features: int
    bias: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.out_features}x{self.in_features}"


Kept = bool | str | None
"""What is kept of a weight between optimizer steps: nothing (None), its scale alone (False), its
payload (True), or ``"both"`` payloads, as in ``FP8Config.cache_weights``.
"""


def kept_weights(config: FP8Config) -> Kept:
    """Return what layers keep of float32 weights under `config`: nothing where they stay plain."""
    return None if config.large_residual_bits is None else config.cache_weights


class LayerTimes(NamedTuple):
    """Median seconds of a forward and backward: without FP8, and with each recipe by name."""

    plain: float
    fp8: dict[str, float]


@dataclass(frozen=True)
class Card:
    """A device, which counts as equal to others of its name: timings on one hold for another."""

    name: str
    device: torch.device = field(compare=False)

    @classmethod
    def of(cls, device: torch.device) -> "Card":
        """Return the card that `device` is."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return cls(name, device)


@dataclass(frozen=True)
class LayerPass:
    """A forward and backward of one layer, run by calling it; it stores no gradients.

    Attributes:
        layer: a layer with random parameters.
        recipe: None: without FP8.
        input: (M, K).
        grad_output: (M, N).
    """

    layer: nn.Linear
    recipe: Recipe | None
    input: Tensor
    grad_output: Tensor

    def __call__(self) -> None:
        output = self.layer(self.input)
        torch.autograd.grad(output, [self.input, *self.layer.parameters()], self.grad_output)


@functools.cache
def layer_times(
    card: Card,
    shape: LayerShape,
    tokens: int,
    recipes: tuple[Recipe, ...],
    kept: Kept = None,
) -> LayerTimes:
    """Time one layer with each of `recipes` and without FP8, in turns; once in this process.

    Takes the memory of one layer's forward and backward, and of the payloads that are kept, and
    leaves random states, autocast and the modes of gradients as they are.

    Args:
        card: the card to time on.
        shape: the shape of the layer.
        tokens: M.
        recipes: recipes that the card runs natively.
        kept: what is kept of the weight, see `kept_weights`.
    """
    with undisturbed(card.device):
        taken = samples(card.device, _passes(card.device, shape, tokens, recipes, kept))
    plain, *fp8 = (statistics.median(times) for times in taken)
    return LayerTimes(plain, {r.name: time for r, time in zip(recipes, fp8, strict=True)})


def seconds(device: torch.device, run: Callable[[], None]) -> float:
    """Measure the seconds that a CUDA device takes for one call of `run`, launched before it
    begins.

    A layer alone is launched more slowly than it runs. In a model the attention, the loss and
    layers that take longer give the host time for that, and a compiled one launches at once.
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
    """Measure the seconds of each of `passes`, in turns, so that a change of clocks meets all
    alike.
    """
    taken: list[list[float]] = [[] for _ in passes]
    for repetition in range(-WARMUP, REPETITIONS):
        for run, times in zip(passes, taken, strict=True):
            duration = seconds(device, run)
            if repetition >= 0:
                times.append(duration)
    return taken


def _passes(
    device: torch.device, shape: LayerShape, tokens: int, recipes: Sequence[Recipe], kept: Kept
) -> list[LayerPass]:
    generator = torch.Generator(device).manual_seed(0)  # the user's stays where it is

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=shape.dtype)

    num_out, num_in = shape.out_features, shape.in_features
    plain = nn.Parameter(random(num_out, num_in).mul_(num_in**-0.5))
    weight = plain
    if kept is not None:
        weight = split_parameter(nn.Parameter(plain.detach().float()), 8)
        plain = nn.Parameter(weight.halves.high)
    bias = nn.Parameter(random(num_out)) if shape.bias else None
    x, grad = random(tokens, num_in).requires_grad_(), random(tokens, num_out)
    layers = [_layer(plain if r is None else weight, bias, r, kept) for r in (None, *recipes)]
    return [LayerPass(*pair, x, grad) for pair in zip(layers, (None, *recipes), strict=True)]


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
        if kept or (kept is not None and keeps_scale(recipe.weight)):
            layer.fp8.payloads.between_steps = kept  # the first pass, which is not timed, fills it
    return layer


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Let real tensors have gradients on `device`, whatever modes the caller is in."""
    with (
        _disable_current_modes(),
        torch.inference_mode(False),  # turns gradients on, too
        torch.autocast(device.type, enabled=False),
    ):
        yield
