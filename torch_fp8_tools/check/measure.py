"""Measurement of each linear layer on a few batches: the error of its product under each recipe.

A sample of rows of each layer's input is kept. Their exact product with the weight is compared with
the product of the casts, by the signal-to-noise ratio of the median row, because over the whole
matrix one row of outliers would hide the error of the others. Gaussian operands have 28.5 dB in
E4M3 (benchmarks/results/numerics.csv).

Legend: M rows (tokens), K in, N out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.conversion.smooth_layers import gated_mlps
from torch_fp8.nn.layer_filter import features, is_linear
from torch_fp8.ops.quantize import dequantize, quantize
from torch_fp8.ops.smooth import column_amax, smooth_factors
from torch_fp8.ops.swiglu_backward import halves
from torch_fp8.quantization.recipe import Recipe, make_recipe

ROWS = 256
"""The maximum number of rows kept of a layer's input."""
ALIGNED = 0.9
"""The |cos| of a channel's gate and up rows from which it counts as aligned."""
DEAD_ROW = 1e-20
EXPERT_RECIPE = "rowwise"


@dataclass
class LayerFindings:
    """The measurements of a linear layer, or of a module of experts.

    Attributes:
        name: the qualified name.
        num_in, num_out: the sizes K and N.
        calls: the number of tokens in each forward.
        ratio: the largest input channel's amax, relative to the median channel's.
        channel: the index of this channel.
        db: the median row's SQNR of the product, by the name of a recipe or ``smooth_swiglu``.
        aligned: the number of aligned channels of gate and up, for a down projection.
        is_down: whether it is the down projection of a gated MLP.
        num_experts: the number of fused experts; 0 for a linear layer.
        without_tokens: the number of experts that received no token.
        worst: the weight and expert with the lowest SQNR.
    """

    name: str
    num_in: int
    num_out: int
    calls: list[int] = field(default_factory=list)
    ratio: float = 1.0
    channel: int = 0
    db: dict[str, float] = field(default_factory=dict)
    aligned: int = 0
    is_down: bool = False
    num_experts: int = 0
    without_tokens: int = 0
    worst: str = ""

    def recipe(self, of_model: str) -> str:
        """Return the layer's recipe; experts have their own, independent of the model's."""
        return EXPERT_RECIPE if self.num_experts else of_model


class _Kept:
    """The rows kept of one layer's input, and the amaxes of its channels."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.amax: Tensor | None = None
        self.calls: list[int] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record the input of a forward."""
        if not (args and isinstance(args[0], Tensor) and args[0].is_floating_point()):
            return
        x = args[0].detach()
        x = x.reshape(-1, x.shape[-1])  # (..., K) -> (M, K)
        self.calls.append(x.shape[0])
        amax = column_amax(x)
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        left = ROWS - sum(map(len, self.rows))
        if left > 0 and len(x):
            step = max(1, len(x) // max(1, ROWS // 4))
            self.rows.append(x[::step][:left].float().clone())


@torch.no_grad()
def measure(
    model: nn.Module,
    names: Iterable[str],
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
    recipes: Sequence[str],
) -> list[LayerFindings]:
    """Run batches through a model that is not converted, and return the measurements of each layer.

    Args:
        model: the model, in evaluation or training mode.
        names: the qualified names of the layers to measure.
        batches: the inputs of `forward`, one after another.
        forward: a function that runs the model on a batch.
        recipes: the names of the recipes whose casts are tried.
    """
    modules = dict(model.named_modules())
    statistics = {name: _Kept() for name in names}
    handles = [modules[name].register_forward_pre_hook(hook) for name, hook in statistics.items()]
    try:
        for batch in batches:
            forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    downs = _gated_mlps(model)
    return [_findings(name, modules[name], statistics[name], downs.get(modules[name]), recipes)
            for name in statistics]  # fmt: skip


def _gated_mlps(model: nn.Module) -> dict[nn.Module, int]:
    """Return the down projections with the number of aligned channels of gate and up."""
    mlps: dict[nn.Module, int] = {}
    for _, module, spec in gated_mlps(model):
        down = getattr(module, spec.down)
        layers = [getattr(module, name) for name in spec.inputs]
        rows = [_weight(layer) for layer in layers] if all(map(is_linear, layers)) else None
        if rows is not None and len(rows) == 1:
            rows = [part.t() for part in halves(rows[0].t(), spec.gate_first)]
        mlps[down] = 0 if rows is None else _num_aligned(*rows)
    return mlps


def _num_aligned(gate: Tensor, up: Tensor) -> int:
    cosine = torch.cosine_similarity(gate, up, dim=1)
    return int((cosine.abs() >= ALIGNED).sum())


def _weight(layer: Any) -> Tensor:
    """Return the weight (N, K) in float32."""
    weight: Tensor = layer.weight.detach().float()
    return weight if isinstance(layer, nn.Linear) else weight.t()


def _findings(
    name: str, layer: nn.Module, kept: _Kept, aligned: int | None, recipes: Sequence[str]
) -> LayerFindings:
    findings = LayerFindings(name, *features(layer), kept.calls)
    findings.is_down, findings.aligned = aligned is not None, aligned or 0
    if kept.amax is None or not kept.rows:
        return findings
    median = kept.amax.median().clamp(min=torch.finfo(torch.float32).tiny)
    findings.channel = int(kept.amax.argmax())
    findings.ratio = float(kept.amax[findings.channel] / median)
    x, weight = torch.cat(kept.rows), _weight(layer)
    exact = x @ weight.t()  # (M, K) @ (K, N)
    for recipe in recipes:
        findings.db[recipe] = median_db(exact, product(x, weight, make_recipe(recipe)))
    if findings.is_down:
        s, inverse, _ = smooth_factors(kept.amax)
        smooth = product(x * s, weight * inverse, make_recipe(recipes[0]))
        findings.db["smooth_swiglu"] = median_db(exact, smooth)
    return findings


def product(x: Tensor, weight: Tensor, casts: Recipe) -> Tensor:
    """Return the product (M, N) of a recipe's casts of x (M, K) and a weight (N, K)."""
    a, b = quantize(x, casts.input), quantize(weight, casts.weight)
    return dequantize(a)[: len(x)] @ dequantize(b)[: len(weight)].t()


def median_db(exact: Tensor, product: Tensor) -> float:
    """Return the SQNR of the median row; infinite if all rows are zero."""
    signal = exact.square().sum(1)
    noise = (product - exact).square().sum(1)
    alive = signal > DEAD_ROW
    if not alive.any():
        return float("inf")
    return float((10 * torch.log10(signal / noise.clamp(min=1e-37)))[alive].median())
