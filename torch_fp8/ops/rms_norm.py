"""RMSNorm that emits FP8: ``y = (x * rstd) * (weight + offset)``, ``rstd = 1/sqrt(mean(x^2)+eps)``.

Zhang and Sennrich, arXiv 1910.07467. Arithmetic is float32; y is rounded once to `out_dtype`, as in
a norm that returns it, and then cast, so the bytes equal those of the norm followed by
``torch_fp8::quantize_2d``. `offset` is 1 if a model stores ``weight - 1`` (Gemma).

A row's statistic needs the whole row, and a scale along R needs 128 rows or the whole tensor. So
there are two operators: `rms_norm_statistics` reads x once and returns the inputs of the second
operator and the tensors that backward saves, and `rms_norm_quantize` reads x again and writes FP8
where the norm would write y. If the scales are known in advance, `rms_norm_quantize_once` does
both.

Every operator is plain torch on the CPU and a Triton kernel on CUDA. With the same rstd the two
agree byte for byte; rstd itself may differ in its last bits, because sums run in another order.
Nothing here is differentiable: the modules that use it call the backward.

Legend: R rows (tokens), C columns (features). Inputs have any strides, results are contiguous.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions, NormBackwardInputs, NormInputs, NormWithRstd
from torch_fp8.ops.quantize import quantize_2d, save_input, saved_values
from torch_fp8.ops.registry import operator
from torch_fp8.quantization.payload_shape import Layouts
from torch_fp8.quantization.scaling import tensor_amax


@operator(lambda norm: norm.x.new_empty(norm.x.shape, dtype=norm.out_dtype))
def rms_norm(norm: NormWithRstd) -> Tensor:
    """Compute ``(x * rstd) * (weight + offset)``, (R, C) of `out_dtype`, without FP8."""
    x, weight, rstd, offset, out_dtype = norm
    y = (x.float() * rstd[:, None]) * (weight.float() + offset)  # (R, C) * (R, 1) * (C,)
    return y.to(out_dtype).contiguous()


def _statistics_fake(inputs: NormInputs, save: bool) -> tuple[Tensor | None, ...]:
    x = inputs.x
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    return (rstd, x.new_empty((), dtype=torch.float32), *save_input(x, save))


@operator(_statistics_fake)
def rms_norm_statistics(
    inputs: NormInputs, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute rstd, the amax of the norm's result, and the saved x, in one read of x.

    Args:
        inputs: the norm's inputs.
        save: whether to return x in FP8.
    Returns:
        rstd (R,) float32; amax () float32, NaN if any element of the result is NaN; x in E4M3 (R,
        C) and its power-of-two scale (R, ceil(C / 128)), both None unless `save`.
    """
    x = inputs.x.contiguous()  # the order of a sum depends on the strides
    squares = x.float().square().sum(1) / max(x.shape[1], 1)
    rstd = (squares + inputs.eps).rsqrt()
    y = rms_norm.reference(inputs._replace(x=x).with_rstd(rstd))
    return (rstd, tensor_amax(y), *save_input(x, save))


@operator(lambda norm, options: options.new_layouts(norm.x))
def rms_norm_quantize(norm: NormWithRstd, options: CastOptions) -> Layouts:
    """Cast `rms_norm` to FP8 in the requested layouts, in one read of x (rowwise: unfused).

    Args:
        norm: the norm whose result is cast.
        options: the cast; tensorwise with the amax of `rms_norm_statistics`, or with a scale, whose
            slot is raised to the amax.
    Returns:
        ``(q, s, qt, st)``, see `torch_fp8.ops.quantize.quantize_2d`.
    """
    return quantize_2d(rms_norm.reference(norm), options)


def _once_fake(inputs: NormInputs, options: CastOptions, save: bool) -> tuple[Tensor | None, ...]:
    rstd, _, *saved = _statistics_fake(inputs, save)
    return (*options.new_layouts(inputs.x), rstd, *saved)


@operator(_once_fake, results=7)
def rms_norm_quantize_once(
    inputs: NormInputs, options: CastOptions, save: bool
) -> tuple[Tensor | None, ...]:
    """Run `rms_norm_statistics` and `rms_norm_quantize` at once, with scales known before.

    A program owns a band of whole rows, 32 with a given tensorwise scale and 128 with blocks, and
    goes through its columns twice, the second time from the L2 cache. So x is read from memory once
    and FP8 is written instead of BF16: no more bytes than the BF16 norm moves. Prefer it if there
    are enough bands to fill the GPU, and if the active bands fit its L2 cache: on an H200 4,224
    tokens of up to 4,096 BF16 features with a given scale, and 16,896 tokens of up to 1,117
    features in blocks. Otherwise the CUDA operator uses two launches.

    Args:
        inputs, save: see `rms_norm_statistics`.
        options: the cast. Tensorwise with a scale, because the amax is not known yet; its slot is
            raised to the amax of the rounded result in the same read. Or with neither; the CUDA
            operator then needs one launch if one program holds all of x.
    Returns:
        ``(q, s, qt, st, rstd, saved_q, saved_scale)``.
    """
    rstd, _, *saved = rms_norm_statistics.reference(inputs, save)
    y = rms_norm.reference(inputs.with_rstd(rstd))
    return (*quantize_2d(y, options), rstd, *saved)


def _sum_fake(
    inputs: NormInputs, addend: Tensor, options: CastOptions, save: bool
) -> tuple[Tensor | None, ...]:
    return (*_once_fake(inputs, options, save), inputs.x.new_empty(inputs.x.shape))


@operator(_sum_fake, results=8)
def sum_norm_quantize_once(
    inputs: NormInputs, addend: Tensor, options: CastOptions, save: bool
) -> tuple[Tensor | None, ...]:
    """Run `rms_norm_quantize_once` on ``x + addend``, which is rounded to the dtype of x.

    A program that casts bands of whole rows with a given scale adds them as it reads them, so that
    nothing reads the sum from memory again.

    Args:
        inputs, options, save: see `rms_norm_quantize_once`.
        addend: (R, C) in float32, bfloat16 or float16, of no wider dtype than x.
    Returns:
        ``(q, s, qt, st, rstd, saved_q, saved_scale, sum)``.
    """
    total = inputs.x + addend
    return (*rms_norm_quantize_once.reference(inputs._replace(x=total), options, save), total)


def _backward_fake(inputs: NormBackwardInputs) -> tuple[Tensor, Tensor]:
    x, cols = inputs.x, inputs.x.shape[1] if inputs.weight_grad else 0
    return x.new_empty(x.shape, dtype=inputs.dx_dtype), x.new_empty(cols, dtype=torch.float32)


@operator(_backward_fake, fuses=True)
def rms_norm_backward(inputs: NormBackwardInputs) -> tuple[Tensor, Tensor]:
    """Compute ``dx = rstd * (g w' - xhat * mean(g w' xhat))``, ``dw = sum over rows of g xhat``.

    Here ``xhat = x * rstd`` and ``w' = weight + offset``, in float32 and in one read of grad and x.
    The order of the sum over rows depends only on the shape, so it is deterministic. In graphs for
    CUDA Inductor joins this with the sums of the gradients before and after it.

    Returns:
        dx (R, C) of `dx_dtype`, dw (C,) float32 or empty.
    """
    grad, x, x_scale, weight, rstd, offset, dx_dtype, weight_grad = inputs
    normalized = saved_values(x.contiguous(), x_scale) * rstd[:, None]
    g = grad.contiguous().float()
    scaled = g * (weight.float() + offset)
    mean = (scaled * normalized).sum(1, keepdim=True) / max(x.shape[1], 1)  # (R, 1)
    dx = (rstd[:, None] * (scaled - normalized * mean)).to(dx_dtype).contiguous()
    return dx, (g * normalized).sum(0) if weight_grad else g.new_empty(0)
