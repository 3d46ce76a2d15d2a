"""Timings of a block of experts on the device at hand, in FP8 and by transformers in BF16.

What is timed is a forward and backward of the module itself, with random weights: casts, gathers,
activation and all. It has fewer experts than the user's, each with as many rows as in the job, so
that it fits beside the model; both times grow with the number of experts alike.

Legend: E experts, T tokens of a micro-batch, k experts of a token, H hidden.
"""

import copy
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.expert_layers import is_batched, to_float8, to_stock
from torch_fp8.conversion.layer_benchmark import Card, samples, undisturbed
from torch_fp8.nn.class_swap import stock_class
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.experts_dispatch import ENTRY
from torch_fp8.nn.layer_filter import expert_weights, experts_per_token

EXPERTS = 16
"""The experts of a block that is timed, at most."""


class ExpertShape(NamedTuple):
    """What the time of a block of experts depends on.

    Attributes:
        kind: name of its class.
        num_experts: experts of this rank.
        weights: shapes of its fused weights, without the number of experts.
        top_k: experts that compute a token.
        rows: rows that an expert computes in a micro-batch, on average.
        dtype: dtype of the product without FP8, bfloat16 or float16.
    """

    kind: str
    num_experts: int
    weights: tuple[tuple[int, ...], ...]
    top_k: int
    rows: int
    dtype: torch.dtype

    def __str__(self) -> str:
        sizes = " and ".join("x".join(map(str, size)) for size in self.weights)
        return f"{self.num_experts} experts of {sizes}"


class ExpertTimes(NamedTuple):
    """Median seconds of a forward and backward: by transformers, and in FP8."""

    plain: float
    fp8: float


@dataclass(frozen=True)
class ExpertPass:
    """A forward and backward of a block, run by calling it; it stores no gradients.

    Attributes:
        shape: the user's block.
        module: a block with random parameters.
        in_fp8: whether its GEMMs run in FP8.
        arguments: arguments of its forward; the first one has a gradient.
        grad_output: gradient of its output.
    """

    shape: ExpertShape
    module: nn.Module
    in_fp8: bool
    arguments: tuple[Tensor, ...]
    grad_output: Tensor

    def __call__(self) -> None:
        output = self.module(*self.arguments)
        inputs = [self.arguments[0], *(p for p in self.module.parameters() if p.requires_grad)]
        torch.autograd.grad(output, inputs, self.grad_output)


def expert_shape(module: Any, tokens: int) -> ExpertShape:
    """Return the shape of a block on this rank.

    Args:
        module: experts.
        tokens: tokens of a micro-batch of one rank.
    """
    weights = [getattr(module, name) for name in expert_weights("", module)]
    count = int(getattr(module, "num_experts", weights[0].shape[0]))
    top_k = experts_per_token(module, getattr(module, "config", None)) or count
    # A token of Llama-4 is computed by all experts. Those of another rank send theirs as well.
    rows = tokens if is_batched(module) else -(-tokens * top_k // count)
    dtype = weights[0].dtype if weights[0].dtype.itemsize == 2 else torch.bfloat16
    sizes = tuple(tuple(weight.shape[1:]) for weight in weights)
    return ExpertShape(stock_class(type(module)).__name__, count, sizes, top_k, rows, dtype)


_times: dict[Any, ExpertTimes] = {}


def expert_times(card: Card, module: Any, shape: ExpertShape, config: FP8Config) -> ExpertTimes:
    """Time a block of this shape by transformers and in FP8, in turns; once in this process.

    Args:
        card: the card to time on.
        module: experts whose copies are timed; stays as it is.
        shape: shape of the experts, see `expert_shape`.
        config: options of the GEMMs.
    """
    key = card, shape, config.wgrad, config.fast_accum
    if key in _times:
        return _times[key]
    with undisturbed(card.device):
        passes = [_pass(module, shape, config, card.device, in_fp8) for in_fp8 in (False, True)]
        plain, fp8 = (statistics.median(times) for times in samples(card.device, passes))
    _times[key] = ExpertTimes(plain, fp8)
    return _times[key]


def _pass(
    module: Any, shape: ExpertShape, config: FP8Config, device: torch.device, in_fp8: bool
) -> ExpertPass:
    count = min(shape.num_experts, EXPERTS)
    twin = _twin(module, shape, count, device)
    if in_fp8:
        to_float8(twin, shape.kind, config, emulate=False)
    generator = torch.Generator(device).manual_seed(0)
    hidden = _hidden(twin)
    if is_batched(twin):
        x = torch.randn(
            count * shape.rows, hidden, generator=generator, device=device, dtype=torch.float32
        )
        arguments: tuple[Tensor, ...] = (x.to(shape.dtype).requires_grad_(),)
    else:
        top_k = min(shape.top_k, count)
        tokens = -(-shape.rows * count // top_k)
        x = torch.randn(tokens, hidden, generator=generator, device=device, dtype=torch.float32)
        index = torch.arange(tokens * top_k, device=device).view(tokens, top_k) % count
        scores = torch.full((tokens, top_k), 1 / top_k, device=device, dtype=shape.dtype)
        arguments = x.to(shape.dtype).requires_grad_(), index, scores
    grad = torch.randn(
        arguments[0].shape, generator=generator, device=device, dtype=torch.float32
    ).to(shape.dtype)
    return ExpertPass(shape, twin, in_fp8, arguments, grad)


def _twin(module: Any, shape: ExpertShape, count: int, device: torch.device) -> nn.Module:
    """Return a copy with random weights, of the first `count` experts, that is not converted."""
    memo: dict[int, Any] = {}
    generator = torch.Generator(device).manual_seed(0)  # the user's stays where it is
    total = max(p.shape[0] for p in module.parameters() if p.ndim == 3)  # of all ranks
    for parameter in module.parameters():
        size = list(parameter.shape)
        if len(size) > 1 and size[0] == total:  # weights (E, N, K) and biases (E, N)
            size[0] = count
        values = torch.randn(size, generator=generator, device=device, dtype=shape.dtype)
        memo[id(parameter)] = nn.Parameter(values.mul_(0.02))
    twin: Any = copy.deepcopy(module, memo)
    if isinstance(twin, Float8Experts):
        to_stock(twin)
    twin.num_experts = count
    if not is_batched(twin):
        twin.config._experts_implementation = ENTRY  # a copy, as the loop of "eager" would wait
    return twin.to(device)


def _hidden(module: Any) -> int:
    """Return the features of a token."""
    name = next(iter(expert_weights("", module)))
    transposed = is_batched(module) or module.is_transposed
    return int(getattr(module, name).shape[1 if transposed else 2])
