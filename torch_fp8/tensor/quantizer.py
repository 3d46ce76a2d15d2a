"""How a linear layer's operands become FP8 payloads: cast now, cast by others, or kept.

Legend: M tokens, K in, N out. Operands are the input (..., K), the weight (N, K) and the gradient
of the output (..., N).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.autograd.checkpoint_pass import stand_in
from torch_fp8.config import FP8Config
from torch_fp8.distributed.fsdp.unsharded_weight import GatheredWeight, gathered_col, gathered_row
from torch_fp8.distributed.tensor_parallel.all_gather import GatheredActivation
from torch_fp8.nn.weight_cache import WeightCache
from torch_fp8.ops.quantize import QuantizedTensor, quantize_layouts
from torch_fp8.ops.quantize_dbias import quantize_layouts_and_sum
from torch_fp8.ops.quantize_delayed import History
from torch_fp8.ops.scaled_mm import cast
from torch_fp8.quantization.payload_shape import padded_rows, scale_shape
from torch_fp8.quantization.recipe import CastSpec, Recipe
from torch_fp8.quantization.scaling import group_amax
from torch_fp8.tensor.lazy_quantized import ProducedActivation


class LinearOptions(NamedTuple):
    """What the autograd function needs beside tensors."""

    name: str
    recipe: Recipe
    config: FP8Config
    dtype: torch.dtype
    """Of the input."""
    out_dtype: torch.dtype
    emulate: bool
    save_for_backward: bool
    weight_cache: WeightCache | None
    group: Any
    transposed: bool = False
    """Whether the weight is stored as (K, N)."""


def casts_by_history(x: Tensor, group: Any) -> bool:
    """Whether the cast of x can find a delayed scale itself, in the read that it takes anyway.

    Not where others have parts of x, or have cast it.
    """
    others = (GatheredActivation, GatheredWeight)
    return group is None and not isinstance(x, others)


def cast_operand(
    x: Tensor,
    spec: CastSpec,
    scale: Tensor | History | None,
    options: LinearOptions,
    *,
    row: bool,
    col: bool,
    sum_dtype: torch.dtype | None = None,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor | None]:
    """x (..., C), as a matrix, and its transpose, as `quantize_layouts`; its sums over all rows.

    What was gathered in FP8 is cast already; a produced activation is cast by its producer.

    Args:
        x: INPUT, WEIGHT or GRAD_OUTPUT.
        spec, row, col: as `quantize_layouts`.
        scale: as there, or the history that the scale comes from.
        sum_dtype: of the sums (C,), added up in float32; None: not wanted.
    """
    by_others = isinstance(x, (GatheredActivation, ProducedActivation))
    if isinstance(scale, History) and not by_others:
        return scale.cast(as_matrix(x), spec, options.config, row=row, col=col, sum_dtype=sum_dtype)
    if isinstance(x, GatheredActivation):
        scale = None  # it brings its own
    if sum_dtype is not None and (row or col) and not by_others:
        assert not isinstance(scale, History)
        return quantize_layouts_and_sum(
            as_matrix(x), spec, scale, row=row, col=col, sum_dtype=sum_dtype
        )
    sums = None
    if sum_dtype is not None:
        sums = cast(as_matrix(x).sum(0, dtype=torch.float32), sum_dtype)
    if isinstance(scale, History):
        assert isinstance(x, ProducedActivation)
        made = x.production.delayed_layouts(spec, scale, options.config, row=row, col=col)
        return *made, sums
    if not row and not col:
        return None, None, sums
    if isinstance(x, GatheredActivation):
        return x.row() if row else None, x.col() if col else None, sums
    if isinstance(x, ProducedActivation):
        return *x.layouts(spec, scale, row=row, col=col), sums
    return *quantize_layouts(as_matrix(x), spec, scale, row=row, col=col), sums


def input_stand_ins(
    x: Tensor, row: QuantizedTensor, fp8: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """For what forward saves of x (..., K): its transposed payload and scale, or x itself."""
    tokens, features = row.qdata.shape
    if not fp8:
        return stand_in((tokens, features), out_dtype, row.qdata), None
    tokens = padded_rows(tokens, row.granularity)
    if row.granularity == "tensorwise":
        return stand_in((features, tokens), row.qdata.dtype, row.qdata), row.scale
    shape = scale_shape(features, tokens, row.granularity)
    scale = stand_in(shape, torch.float32, row.qdata)
    return stand_in((features, tokens), row.qdata.dtype, row.qdata), scale


def as_matrix(x: Tensor) -> Tensor:
    """x (..., C) as (R, C)."""
    if isinstance(x, ProducedActivation):
        return x.production.dense()
    return x.reshape(-1, x.shape[-1])


def amax_of(x: Tensor, group: Any) -> Tensor:
    """`group_amax`; a produced activation has its own, which nothing is launched for again."""
    if not isinstance(x, ProducedActivation):
        return group_amax(x, group)
    amax = x.production.amax()
    return amax if group is None else group_amax(amax, group)


def weight_row(
    weight: Tensor, scale: Tensor | None, history: History | None, options: LinearOptions
) -> QuantizedTensor:
    """The weight (N, K), quantized along K: gathered so, kept so, or cast now.

    Stored as (K, N) it is the transposed layout that has this shape.
    """
    spec, flip = options.recipe.weight, options.transposed
    if isinstance(weight, GatheredWeight):
        return gathered_col(weight, spec) if flip else gathered_row(weight, spec)
    if options.weight_cache is not None:
        return options.weight_cache.row(weight, spec)
    how = history if scale is None else scale
    row, col, _ = cast_operand(weight, spec, how, options, row=not flip, col=flip)
    made = col if flip else row
    assert made is not None
    return made


def weight_col(
    weight: Tensor, scale: Tensor | None, options: LinearOptions, grad_output: Tensor
) -> QuantizedTensor:
    """The transposed weight (K, N), quantized along N, likewise; for the layer's backward."""
    spec, flip = options.recipe.weight, options.transposed
    if isinstance(weight, GatheredWeight):
        return gathered_row(weight, spec) if flip else gathered_col(weight, spec, grad_output)
    kept = None if options.weight_cache is None else options.weight_cache.col(weight)
    if kept is not None:
        return kept
    row, col = quantize_layouts(weight, spec, scale, row=flip, col=not flip)
    made = row if flip else col
    assert made is not None
    return made


def output_dtype(input: Tensor) -> torch.dtype:
    """What a linear layer returns: autocast's dtype where autocast is on, else the input's."""
    return autocast_dtype(input.device.type) or input.dtype


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """None where autocast is off, as it is on the meta device."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None
