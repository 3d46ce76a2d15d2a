"""Measurement of fused experts on a few batches: the error of both products of each expert.

A sample of the tokens of each expert is kept. Their products with the expert's weights are compared
with those of the experts' casts (`torch_fp8.nn.experts.expert_recipe`). The worst expert represents
its module, which runs in FP8 as a whole or not at all.

Legend: E experts, T tokens, k experts of a token, K in, N out.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.config import FP8Config
from torch_fp8.conversion.expert_layers import is_batched
from torch_fp8.nn.experts import expert_recipe
from torch_fp8_tools.check.measure import EXPERT_RECIPE, LayerFindings, median_db, product

ROWS = 32
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
        left = ROWS - sum(map(len, self.rows[expert]))
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
