"""RMSNorm that emits FP8: ``y = (x * rstd) * (weight + offset)``, ``rstd = 1/sqrt(mean(x^2)+eps)``.

Zhang and Sennrich, arXiv 1910.07467. Float32 inside; y is rounded to `out_dtype` once, as by a norm
that returns it, and only then cast: the bytes are those of the norm followed by
``torch_fp8::quantize_2d``. `offset` is 1 where a model stores ``weight - 1`` (Gemma).

A row's statistic needs the whole row, a scale along R needs 128 rows or the tensor; hence two
operators: `rms_norm_statistics` reads x once and returns what the second needs and what backward
saves, `rms_norm_quantize` reads x again and writes FP8 where the norm would write y. Where the
rule of the scales is known beforehand, `rms_norm_quantize_once` does both, and so does
`rms_norm_quantize_delayed` where a history suggests the scale.

Every operator is opaque to torch.compile, plain torch on the CPU and a Triton kernel on CUDA. With
the same rstd the two agree byte for byte; rstd itself may differ in its last bits, as sums in
another order do. Nothing here is differentiable: the modules that use it wire their backward.

Legend: R rows (tokens), C columns (features). Inputs have any strides, results are contiguous.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions, DelayedCastOptions
from torch_fp8.ops.fused_quantize import (
    cast_delayed,
    cast_delayed_fake,
    cast_result,
    cast_result_fake,
    save_input,
    saved_values,
    taken_amax,
)
from torch_fp8.ops.registry import operator
from torch_fp8.quantization.payload_shape import Layouts
from torch_fp8.quantization.scaling import tensor_amax


def _kernels() -> Any:
    from torch_fp8.kernels import rms_norm

    return rms_norm


def _norm_fake(
    x: Tensor, weight: Tensor, rstd: Tensor, offset: float, out_dtype: torch.dtype
) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


@operator(_norm_fake, _kernels)
def rms_norm(
    x: Tensor, weight: Tensor, rstd: Tensor, offset: float, out_dtype: torch.dtype
) -> Tensor:
    """Compute ``(x * rstd) * (weight + offset)``, (R, C) of `out_dtype`, where BF16 is wanted.

    Args:
        x: (R, C) float32, bfloat16 or float16.
        weight: (C,), any floating dtype.
        rstd: (R,) float32 of `rms_norm_statistics`.
        offset: added to the weight.
        out_dtype: the dtype of the result.
    """
    y = (x.float() * rstd[:, None]) * (weight.float() + offset)
    return y.to(out_dtype).contiguous()


def _statistics_fake(
    x: Tensor, weight: Tensor, eps: float, offset: float, out_dtype: torch.dtype, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    return (rstd, x.new_empty((), dtype=torch.float32), *save_input(x, save))


@operator(_statistics_fake, _kernels)
def rms_norm_statistics(
    x: Tensor, weight: Tensor, eps: float, offset: float, out_dtype: torch.dtype, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute in one read of x: rstd, the amax of the norm's result, and x as backward saves it.

    Args:
        x: (R, C) float32, bfloat16 or float16.
        weight: (C,), any floating dtype.
        eps: added to the mean of squares.
        offset: added to the weight.
        out_dtype: the dtype of the result whose amax is taken.
        save: whether to return x in FP8.
    Returns:
        rstd (R,) float32; amax () float32, NaN if any element of the result is; x in E4M3 (R, C)
        and its power-of-two scale (R, ceil(C / 128)), both None unless `save`.
    """
    x = x.contiguous()  # the order of a sum follows the strides
    squares = x.float().square().sum(1) / max(x.shape[1], 1)
    rstd = (squares + eps).rsqrt()
    y = rms_norm.reference(x, weight, rstd, offset, out_dtype)
    return (rstd, tensor_amax(y), *save_input(x, save))


def _quantize_fake(
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    out_dtype: torch.dtype,
    options: CastOptions,
) -> Layouts:
    return cast_result_fake(x, options)


@operator(_quantize_fake, _kernels)
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    out_dtype: torch.dtype,
    options: CastOptions,
) -> Layouts:
    """Cast `rms_norm` to FP8 in the layouts asked for, in one read of x (rowwise: unfused).

    Args:
        x, weight, rstd, offset, out_dtype: see `rms_norm`.
        options: the cast; tensorwise with the amax of `rms_norm_statistics`, or with a scale.
    Returns:
        ``(q, s, qt, st)``, see `torch_fp8.ops.fused_quantize`.
    Raises:
        ValueError: if tensorwise has not exactly one of amax and scale, or another has any.
    """
    return cast_result(rms_norm.reference(x, weight, rstd, offset, out_dtype), options)


def _once_fake(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    out_dtype: torch.dtype,
    options: CastOptions,
    save: bool,
) -> tuple[Tensor | None, ...]:
    rstd, amax, *saved = _statistics_fake(x, weight, eps, offset, out_dtype, save)
    taken = None if options.scale is None else amax
    return (*cast_result_fake(x, options), rstd, *saved, taken)


@operator(_once_fake, _kernels, results=8)
def rms_norm_quantize_once(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    out_dtype: torch.dtype,
    options: CastOptions,
    save: bool,
) -> tuple[Tensor | None, ...]:
    """Run `rms_norm_statistics` and `rms_norm_quantize` at once, for scales of a rule known
    beforehand.

    A program owns a band of whole rows, 32 with a given tensorwise scale and 128 with blocks, and
    goes through its columns twice, the second time out of the L2 cache: x is read from memory once
    and FP8 written instead of BF16, no byte more than the BF16 norm moves. It is to be preferred
    where there are bands enough to fill the card and what those at work hold stays in its L2 cache,
    on an H200 4,224 tokens of up to 4,096 BF16 features with a given scale, and 16,896 tokens of up
    to 1,117 features in blocks; the CUDA operator takes two launches otherwise.

    Args:
        x, weight, eps, offset, out_dtype, save: see `rms_norm_statistics`.
        options: the cast; tensorwise with a scale, as the amax is not known yet.
    Returns:
        ``(q, s, qt, st, rstd, saved_q, saved_scale, amax)``; the amax () of the rounded result is
        taken in the same read for tensorwise, whose history wants it, and None otherwise.
    Raises:
        ValueError: if tensorwise has no scale, or another granularity has one.
    """
    rstd, _, *saved = rms_norm_statistics.reference(x, weight, eps, offset, out_dtype, save)
    y = rms_norm.reference(x, weight, rstd, offset, out_dtype)
    return (*cast_result(y, options), rstd, *saved, taken_amax(y, options))


def _delayed_fake(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    out_dtype: torch.dtype,
    options: DelayedCastOptions,
    save: bool,
) -> tuple[Tensor | None, ...]:
    rstd, _, *saved = _statistics_fake(x, weight, eps, offset, out_dtype, save)
    q, scale, qt, amax = cast_delayed_fake(x, options)
    return (q, scale, qt, rstd, *saved, amax)


@operator(_delayed_fake, _kernels, results=7)
def rms_norm_quantize_delayed(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    out_dtype: torch.dtype,
    options: DelayedCastOptions,
    save: bool,
) -> tuple[Tensor | None, ...]:
    """Run `rms_norm_quantize_once` with the tensorwise scale that a history suggests.

    Args:
        x, weight, eps, offset, out_dtype, save: see `rms_norm_statistics`.
        options: the cast.
    Returns:
        ``(q, scale, qt, rstd, saved_q, saved_scale, amax)``; scale () and the amax () of the
        rounded result float32.
    """
    rstd, _, *saved = rms_norm_statistics.reference(x, weight, eps, offset, out_dtype, save)
    y = rms_norm.reference(x, weight, rstd, offset, out_dtype)
    q, scale, qt, amax = cast_delayed(y, options)
    return (q, scale, qt, rstd, *saved, amax)


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    dx_dtype: torch.dtype,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    dw = x.new_empty(x.shape[1] if weight_grad else 0, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dx_dtype), dw


@operator(_backward_fake, _kernels)
def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    dx_dtype: torch.dtype,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Compute ``dx = rstd * (g w' - xhat * mean(g w' xhat))``, ``dw = sum over rows of g xhat``.

    With ``xhat = x * rstd`` and ``w' = weight + offset``, float32 inside, in one read of grad and
    x. The sum over rows is taken in an order that the shape alone decides: deterministic.

    Args:
        grad: (R, C) float32, bfloat16 or float16, the gradient of the result.
        x: (R, C): what was normalized, or, with `x_scale`, the FP8 that was saved of it.
        x_scale: (R, ceil(C / 128)) float32 or None.
        weight, rstd, offset: see `rms_norm`.
        dx_dtype: the dtype of the gradient of x.
        weight_grad: whether dw is wanted.
    Returns:
        dx (R, C) of `dx_dtype`, dw (C,) float32 or empty.
    """
    normalized = saved_values(x.contiguous(), x_scale) * rstd[:, None]
    g = grad.contiguous().float()
    scaled = g * (weight.float() + offset)
    mean = (scaled * normalized).sum(1, keepdim=True) / max(x.shape[1], 1)
    dx = (rstd[:, None] * (scaled - normalized * mean)).to(dx_dtype).contiguous()
    return dx, (g * normalized).sum(0) if weight_grad else g.new_empty(0)
