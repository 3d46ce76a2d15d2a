"""Measurement of each linear layer on a few batches: the error of its product under each recipe.

A sample of rows of each layer's input is kept. Their exact product with the weight is compared with
the product of the casts, by the signal-to-noise ratio of the median row, because over the whole
matrix one row of outliers would hide the error of the others. Gaussian operands have 28.5 dB in
E4M3 (benchmarks/results/numerics.csv).

Of fused experts the error of both products is measured. A sample of the tokens of each expert is
kept. Their products with the expert's weights are compared with those of the experts' casts
(`torch_fp8.nn.experts.expert_recipe`). The worst expert represents its module, which runs in FP8 as
a whole or not at all.

Legend: M rows (tokens), K in, N out; E experts, T tokens, k experts of a token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.detect_gated_mlp import gated_mlps
from torch_fp8.conversion.expert_layers import is_batched
from torch_fp8.nn.experts import expert_recipe
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
        largest_channel: the largest input channel's amax, relative to the median channel's.
        channel: the index of this channel.
        db: the median row's SQNR of the product, by the name of a recipe or ``smooth_swiglu``.
        aligned_channels: the number of aligned channels of gate and up, for a down projection.
        is_down: whether it is the down projection of a gated MLP.
        experts: the number of fused experts; 0 for a linear layer.
        experts_without_tokens: the number of experts that received no token.
        worst: the weight and expert with the lowest SQNR.
    """

    name: str
    num_in: int
    num_out: int
    calls: list[int] = field(default_factory=list)
    largest_channel: float = 1.0
    channel: int = 0
    db: dict[str, float] = field(default_factory=dict)
    aligned_channels: int = 0
    is_down: bool = False
    experts: int = 0
    experts_without_tokens: int = 0
    worst: str = ""

    def recipe(self, of_model: str) -> str:
        """Return the layer's recipe; experts have their own, independent of the model's."""
        return EXPERT_RECIPE if self.experts else of_model


class LayerRows:
    """The rows kept of one layer's input, and the amaxes of its channels.

    Args:
        name: the layer's qualified name.
        module: the layer, which is not converted.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
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

    def findings(self, aligned: int | None, recipes: Sequence[str]) -> LayerFindings:
        """Return the layer's measurements.

        Args:
            aligned: the number of aligned channels of a down projection; None for other layers.
            recipes: the names of the recipes whose casts are tried.
        """
        findings = LayerFindings(self.name, *features(self.module), self.calls)
        findings.is_down, findings.aligned_channels = aligned is not None, aligned or 0
        if self.amax is None or not self.rows:
            return findings
        median = self.amax.median().clamp(min=torch.finfo(torch.float32).tiny)
        findings.channel = int(self.amax.argmax())
        findings.largest_channel = float(self.amax[findings.channel] / median)
        x, weight = torch.cat(self.rows), _weight(self.module)
        exact = x @ weight.t()  # (M, K) @ (K, N)
        for recipe in recipes:
            findings.db[recipe] = median_db(exact, product(x, weight, make_recipe(recipe)))
        if findings.is_down:
            s, inverse, _ = smooth_factors(self.amax)
            smooth = product(x * s, weight * inverse, make_recipe(recipes[0]))
            findings.db["smooth_swiglu"] = median_db(exact, smooth)
        return findings


def down_projections(model: nn.Module) -> dict[nn.Module, int]:
    """Return the down projections with the number of aligned channels of gate and up."""
    mlps: dict[nn.Module, int] = {}
    for _, module, spec in gated_mlps(model):
        down = getattr(module, spec.down)
        layers = [getattr(module, name) for name in spec.inputs]
        rows = [_weight(layer) for layer in layers] if all(map(is_linear, layers)) else []
        if len(rows) == 1:
            rows = [part.t() for part in halves(rows[0].t(), spec.gate_first)]
        cosine = (
            torch.cosine_similarity(*rows, dim=1) if rows else torch.zeros(0, dtype=torch.float32)
        )
        mlps[down] = int((cosine.abs() >= ALIGNED).sum())
    return mlps


def _weight(layer: Any) -> Tensor:
    """Return the weight (N, K) in float32."""
    weight: Tensor = layer.weight.detach().float()
    return weight if isinstance(layer, nn.Linear) else weight.t()


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


EXPERT_ROWS = 32
"""The maximum number of tokens kept of each expert."""


class ExpertRows:
    """The tokens of one module's experts, and their numbers.

    Args:
        name: the module's qualified name.
        module: the module, which is not converted.
        weights: the names of its two weights.
    """

    def __init__(self, name: str, module: nn.Module, weights: tuple[str, ...]) -> None:
        self.name, self.module, self.weights = name, module, weights
        self.size = int(getattr(module, weights[0]).shape[0])
        self.rows: list[list[Tensor]] = [[] for _ in range(self.size)]
        self.counts, self.calls = [0] * self.size, list[int]()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record the arguments of a forward: tokens, and their experts if they are an argument."""
        if is_batched(module):
            x = args[0].detach().unflatten(0, (self.size, -1))  # (E, T, K)
            self.calls.append(x.shape[1])
            for expert in range(self.size):
                self._add(expert, x[expert][x[expert].any(-1)])
            return
        x, index = args[0].detach(), args[1]
        self.calls.append(len(x))
        for expert in range(self.size):
            self._add(expert, x[(index == expert).any(-1)])

    def _add(self, expert: int, rows: Tensor) -> None:
        left = EXPERT_ROWS - sum(map(len, self.rows[expert]))
        self.counts[expert] += len(rows)
        if left > 0 and len(rows):
            self.rows[expert].append(rows[:left].float())

    def findings(self) -> LayerFindings:
        """Return the worst expert's measurements."""
        shape = self._weight(0, 0).shape
        findings = LayerFindings(self.name, shape[1], shape[0], self.calls, experts=self.size)
        findings.experts_without_tokens = self.counts.count(0)
        for expert, rows in enumerate(self.rows):
            if not rows:
                continue
            for name, db in zip(self.weights, self._decibels(expert, torch.cat(rows)), strict=True):
                if not db >= findings.db.get(EXPERT_RECIPE, float("inf")):  # nor NaN
                    findings.db[EXPERT_RECIPE], findings.worst = db, f"{name} of expert {expert}"
        return findings

    def _decibels(self, expert: int, x: Tensor) -> Iterator[float]:
        """Yield the median row's SQNR of both products of an expert."""
        recipe = expert_recipe(FP8Config())
        for place, name in enumerate(self.weights):
            weight = self._weight(place, expert)
            exact = x @ weight.t()  # (T, K) @ (K, N)
            yield median_db(exact, product(x, weight, recipe))
            bias = getattr(self.module, f"{name}_bias", None)
            exact = exact if bias is None else exact + bias[expert].float()
            x = exact if place else self._activated(exact)

    def _activated(self, h: Tensor) -> Tensor:
        module: Any = self.module
        if is_batched(module):
            gate, up = h.chunk(2, dim=-1)
            activated: Tensor = up * module.act_fn(gate)
        else:
            activated = module._apply_gate(h) if module.has_gate else module.act_fn(h)
        return activated

    def _weight(self, place: int, expert: int) -> Tensor:
        """Return one expert's weight (N, K) in float32."""
        module: Any = self.module
        weight: Tensor = getattr(module, self.weights[place])[expert].detach().float()
        return weight.t() if is_batched(module) or module.is_transposed else weight


def expert_rows(model: nn.Module, names: Iterable[str]) -> list[ExpertRows]:
    """Return the hooks for a model's experts.

    Args:
        model: the model, not converted.
        names: the qualified names of the fused weights that FP8 supports.
    """
    weights: dict[str, list[str]] = {}
    for name in names:
        holder, _, weight = name.rpartition(".")
        weights.setdefault(holder, []).append(weight)
    return [ExpertRows(name, model.get_submodule(name), tuple(w)) for name, w in weights.items()]
