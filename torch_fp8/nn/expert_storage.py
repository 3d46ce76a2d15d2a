"""Stacked FP8 weights of experts, (E, R, C) with one scale per row, and the state of their module.

The GEMM that contracts the last dimension reads these bytes. The other GEMM reads their transpose,
with new scales for each expert. Scales are powers of two, so changing them shifts exponents, and
only values below E4M3's smallest number are lost.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_fp8.config import FP8Config
from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.nn.frozen_storage import FrozenState
from torch_fp8.ops.moe_rows import transpose_experts, transpose_groups
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.quantization.formats import GEMM_ALIGNMENT
from torch_fp8.quantization.recipe import CastSpec, Recipe
from torch_fp8.tensor.payload_cache import PayloadCache


def transposed_stacked(
    x: QuantizedTensor, spec: CastSpec, after: Tensor | None = None
) -> QuantizedTensor:
    """Transpose stacked weights (E, R, C) with scales (E, R, 1) to (E, C, R), scales (E, C, 1).

    Args:
        x: the weights.
        spec: their cast.
        after: see `CastOptions`.
    """
    if x.qdata.is_cuda and x.qdata.shape[1] % GEMM_ALIGNMENT == 0:
        return transposed_at_once(x, after)
    options = CastOptions.of(spec, after=after, rowwise=True, columnwise=False)
    qdata, scale = transpose_experts(x.qdata, x.scale, options)
    return x._replace(qdata=qdata, scale=scale)


def transposed_at_once(x: QuantizedTensor, after: Tensor | None = None) -> QuantizedTensor:
    """Compute `transposed_stacked` with the kernels that transpose groups of tokens, as bytes.

    Args:
        x, after: see `transposed_stacked`; R is a multiple of 16.
    """
    experts, rows, cols = x.qdata.shape
    ends = torch.arange(1, experts + 1, device=x.qdata.device, dtype=torch.int32) * rows
    # (E * R, C): an expert's rows are its group
    flat = x._replace(qdata=x.qdata.flatten(0, 1), scale=x.scale.reshape(-1, 1))
    turned = transpose_groups(flat, ends, after=after)  # (C, E * R) with scales (E, C)
    codes = turned.qdata.view(torch.uint8).view(cols, experts, rows)
    qdata = codes.transpose(0, 1).contiguous().view(x.qdata.dtype)  # (E, C, R)
    return x._replace(qdata=qdata, scale=turned.scale[..., None])


@dataclass
class ExpertsFP8:
    """State that conversion adds to a module of experts, as its attribute `fp8`.

    Attributes:
        name: qualified name, for errors.
        config: configuration of the model, or of this module.
        recipe: recipe of the experts.
        emulate: whether the GEMMs run through the reference path.
        frozen: state of weights that are stored as FP8 only, or None if they are not.
        observers: monitors that see the operands of the GEMMs, by the name of the weight
            (`torch_fp8.monitor.expert_observer.ExpertObserver`), or None without a monitor.
        tokens: monitor's counter of each expert's tokens, or None.
        caches: caches of FP8 payloads, by the name of the weight.
    """

    name: str
    config: FP8Config
    recipe: Recipe
    emulate: bool
    frozen: FrozenState | None = None
    observers: dict[str, Any] | None = None
    tokens: Any = None
    caches: dict[str, PayloadCache] = field(default_factory=dict)
