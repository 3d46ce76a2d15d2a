"""Smooth-SwiGLU folded into exported weights: ``up <- s up``, ``down <- down / s``.

A training checkpoint has the weights without s, and each forward computes s from its tokens. An
inference engine does not; its activations would have the outliers that training never cast. So an
export contains the factors of the last forward in the weights, row by row in the up projection and
column by column in the down projection. They are powers of two, so the function is the same, and
the FP8 codes of the down projection are those of that forward.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_fp8.conversion.smooth_layers import gated_mlps
from torch_fp8.nn.gated_mlp import GatedMLPSpec
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.smooth import smooth_factors
from torch_fp8.tensor.base import dequantized


class _Factors(NamedTuple):
    """Factors of a weight (N, K): of an up projection's rows, or a down projection's columns."""

    values: Tensor
    channels: Tensor | None = None
    """The amaxes (K,) of a down projection's input."""


class SmoothFold:
    """The factors of a model's gated MLPs, from their last forwards.

    It skips MLPs in which a layer does not run in FP8 or has an adapter, or whose up projection has
    a bias, and MLPs of which only compiled forwards have run, because these store no factors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._factors: dict[nn.Module, _Factors] = {}
        for _, module, spec in gated_mlps(model):
            self._add(module, spec)

    def _add(self, module: nn.Module, spec: GatedMLPSpec) -> None:
        up = getattr(module, spec.inputs[-1])  # or one layer for gate and up
        down = getattr(module, spec.down)
        if not (isinstance(up, Float8Layer) and isinstance(down, Float8Layer)):
            return
        channels = None if down.fp8.channels is None else down.fp8.channels.amax
        if channels is None or up.bias is not None or not down.fp8.recipe.smooth:
            return
        s, inverse, _ = smooth_factors(channels)
        rows = s
        if len(spec.inputs) == 1:
            parts = (torch.ones_like(s), s)
            rows = torch.cat(parts if spec.gate_first else parts[::-1])
        self._factors[up] = _Factors(rows)
        self._factors[down] = _Factors(inverse, channels)

    def __contains__(self, layer: object) -> bool:
        return layer in self._factors

    def weight(self, layer: Float8Layer, weight: Tensor) -> Tensor:
        """Return a layer's stored weight with its factors."""
        factors = self._factors.get(layer)
        if factors is None:
            return weight
        weight = dequantized(weight)
        values, by_row = factors.values.to(weight.device), factors.channels is None
        folded = weight.float() * (values[:, None] if by_row != layer.fp8.transposed else values)
        return folded.to(weight.dtype)

    def input_scale(self, layer: Float8Layer, scale: Tensor) -> Tensor:
        """Return delayed scaling's scale () of a layer's input with its factors.

        Args:
            layer: the layer.
            scale: the input's scale for the largest input in the history. The largest value is
                assumed to be in the channel that was the largest in the last forward.
        """
        factors = self._factors.get(layer)
        if factors is None or factors.channels is None:
            return scale
        channels = factors.channels
        s, _, largest = smooth_factors(channels)
        relative = torch.maximum(largest / channels.amax(), s[channels.argmax()])
        return scale * relative.to(scale.device)
