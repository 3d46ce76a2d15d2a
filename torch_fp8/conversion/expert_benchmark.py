"""Timings of a block of experts on this device, in FP8 and by transformers in BF16.

They time a forward and backward of the module itself with random weights, including casts, gathers
and the activation. To fit beside the model, the copy has fewer experts, but each has as many rows
as in the job. Both times grow in proportion to the number of experts.

Legend: E experts, T tokens of a micro-batch, k experts per token, H hidden.
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
"""Largest number of experts in a timed block."""


class ExpertShape(NamedTuple):
    """All sizes on which the time of a block of experts depends.

    Attributes:
        kind: name of the module's class.
        num_experts: number of experts on this rank.
        weights: shapes of the fused weights, without the expert dimension.
        top_k: number of experts that compute a token.
        rows: average number of rows that an expert computes in a micro-batch.
        dtype: dtype of the GEMMs without FP8, bfloat16 or float16.
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
    """Median seconds of a forward and backward: by transformers (`plain`) and in FP8."""

    plain: float
    fp8: float


@dataclass(frozen=True)
class ExpertPass:
    """A forward and backward of a block, which a call runs without storing gradients.

    Attributes:
        shape: sizes of the user's block.
        module: block with random parameters.
        in_fp8: whether its GEMMs run in FP8.
        arguments: arguments of its forward; the first one requires a gradient.
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
        module: module of experts.
        tokens: number of tokens in one rank's micro-batch.
    """
    weights = [getattr(module, name) for name in expert_weights("", module)]
    count = int(getattr(module, "num_experts", weights[0].shape[0]))
    top_k = experts_per_token(module, getattr(module, "config", None)) or count
    # All experts of Llama-4 compute each token. Other ranks send tokens to these experts, too.
    rows = tokens if is_batched(module) else -(-tokens * top_k // count)
    dtype = weights[0].dtype if weights[0].dtype.itemsize == 2 else torch.bfloat16
    sizes = tuple(tuple(weight.shape[1:]) for weight in weights)
    return ExpertShape(stock_class(type(module)).__name__, count, sizes, top_k, rows, dtype)


_times: dict[Any, ExpertTimes] = {}


def expert_times(card: Card, module: Any, shape: ExpertShape, config: FP8Config) -> ExpertTimes:
    """Time a block of this shape by transformers and in FP8, in turns; cached in this process.

    Args:
        card: card to time on.
        module: experts whose copies are timed; it does not change.
        shape: sizes of the experts, see `expert_shape`.
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
    """Return an unconverted copy of the module with random weights and `count` experts."""
    memo: dict[int, Any] = {}
    generator = torch.Generator(device).manual_seed(0)  # leaves torch's default generator alone
    total = max(p.shape[0] for p in module.parameters() if p.ndim == 3)  # E of all ranks
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
        twin.config._experts_implementation = (
            ENTRY  # the config is a copy; the loop of "eager" would synchronize
        )
    return twin.to(device)


def _hidden(module: Any) -> int:
    """Return H, the features of a token."""
    name = next(iter(expert_weights("", module)))
    transposed = is_batched(module) or module.is_transposed
    return int(getattr(module, name).shape[1 if transposed else 2])
