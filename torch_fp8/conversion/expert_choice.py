"""Recipe ``auto`` for fused experts: FP8, or BF16 if FP8 does not pay.

It times a training pass of each distinct block of experts in FP8 and by transformers in BF16, with
the rows that an expert gets from ``FP8Config.tokens`` tokens. Casting a weight costs the same for
few rows as for many, so small experts need many tokens. A block that is less than `LEAST_SPEEDUP`
times as fast in FP8 stays in BF16. Experts with adapters always run in FP8, without a measurement:
their weights are stored as FP8 only, and no other function multiplies by the adapters' factors.
Ranks agree on the times as for linear layers (`torch_fp8.conversion.autotune`).

The passes run the module itself with random weights, including casts, gathers and the activation.
To fit beside the model, the copy has fewer experts, but each has as many rows as in the job. Both
times grow in proportion to the number of experts.

Legend: E experts, T tokens of a micro-batch, k experts per token, H hidden.
"""

import copy
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.autotune import NO_EXPERTS, ExpertChoice, agreed_times
from torch_fp8.conversion.expert_layers import is_batched, to_float8, to_stock
from torch_fp8.conversion.layer_benchmark import Card, TimedPass, samples, undisturbed
from torch_fp8.nn.class_swap import stock_class
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.experts_dispatch import ENTRY
from torch_fp8.nn.layer_filter import expert_weights, experts_per_token
from torch_fp8.ops.one_rank import can_ask
from torch_fp8.ops.scaled_grouped_mm import grouped_natively

EXPERTS = 16
"""Largest number of experts in a timed block."""
LEAST_SPEEDUP = 1.05
"""Least speedup over BF16 at which experts run in FP8."""


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


def choose_experts(
    model: nn.Module, experts: Mapping[str, nn.Module], config: FP8Config, device: torch.device
) -> ExpertChoice:
    """Choose FP8 or BF16 for each module of experts; if the measurement fails, warn and use FP8.

    Args:
        model: model to be converted.
        experts: modules of the fused weights that FP8 can run, by the weights' qualified names.
        config: options, with recipe ``auto``.
        device: device on which the model will run.
    Raises:
        RuntimeError: see `torch_fp8.ops.one_rank.answer_of_one`.
    """
    measured = {name: m for name, m in experts.items() if m not in _adapted(model)}
    native = config.backend == "torch" and not config.emulate and grouped_natively(device)
    if not (measured and native and can_ask()):
        return NO_EXPERTS
    shapes = {name: expert_shape(module, config.tokens) for name, module in measured.items()}
    modules = {shapes[name]: module for name, module in measured.items()}
    distinct = sorted(modules, key=repr)
    options = config.tokens, config.wgrad, config.fast_accum
    card, texts = Card.of(device), ("", "experts in FP8", "")

    def time(shape: ExpertShape) -> ExpertTimes:
        return expert_times(card, modules[shape], shape, config)

    answer = agreed_times(device, options, distinct, time, *texts)
    if "failure" in answer:
        return NO_EXPERTS
    times = {s: ExpertTimes(*t) for s, t in zip(distinct, answer["times"], strict=True)}
    speedups = {f"{s}, {s.rows} rows each": t.plain / t.fp8 for s, t in times.items()}
    left = {
        name: f"experts are {times[s].plain / times[s].fp8:.2f} times as fast in FP8, below the "
        f"{LEAST_SPEEDUP} required: {1e6 * times[s].fp8:.0f} us against "
        f"{1e6 * times[s].plain:.0f} us at {s.rows} rows each, {config.tokens} tokens"
        for name, s in shapes.items()
        if times[s].plain < LEAST_SPEEDUP * times[s].fp8
    }
    return ExpertChoice(speedups, left)


def _adapted(model: nn.Module) -> set[nn.Module]:
    """Return the modules of experts whose weights have PEFT adapters."""
    return {
        adapter.get_base_layer()
        for adapter in model.modules()
        if callable(getattr(adapter, "get_delta_factors", None))
    }


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
) -> TimedPass:
    count = min(shape.num_experts, EXPERTS)
    twin: Any = _twin(module, shape, count, device)
    if in_fp8:
        to_float8(twin, shape.kind, config, emulate=False)
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        values = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        return values.to(shape.dtype)

    transposed = is_batched(twin) or twin.is_transposed
    hidden = shape.weights[0][0 if transposed else 1]  # (H, 2I) or (2I, H)
    arguments: tuple[Tensor, ...]
    if is_batched(twin):
        arguments = (random(count * shape.rows, hidden).requires_grad_(),)
    else:
        top_k = min(shape.top_k, count)
        tokens = -(-shape.rows * count // top_k)
        index = torch.arange(tokens * top_k, device=device).view(tokens, top_k) % count
        scores = torch.full((tokens, top_k), 1 / top_k, device=device, dtype=shape.dtype)
        arguments = random(tokens, hidden).requires_grad_(), index, scores
    grad = random(*arguments[0].shape)
    return TimedPass(twin, twin.fp8.recipe if in_fp8 else None, arguments, grad)


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
        # The config is a copy; the loop of "eager" would synchronize.
        twin.config._experts_implementation = ENTRY
    return twin.to(device)
