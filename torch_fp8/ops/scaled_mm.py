"""The only module that calls torch's scaled matmul; it knows what each device can run.

Every GEMM has the form ``a @ b.T`` with both operands contiguous along the contraction dimension,
the only layout that Hopper's FP8 tensor cores support. Any shape works: casts pad the tokens to
supported sizes (`torch_fp8.quantization.payload_shape`), and `torch_fp8.ops.gemm_operand` pads the
rest.

In a graph of torch.compile for CUDA, GEMMs are ``aten::_scaled_mm``, which inductor calls without
our Python. Those with block scales, with sizes that need padding, or that cuBLASLt may refuse, are
``torch_fp8::scaled_mm``: Dynamo of torch 2.11 breaks the graph at ``F.scaled_mm``, and inductor of
2.13 replaces torch's operator by its predecessor, which does not accept block scales laid out for
the newer one.

A bias is added in the GEMM's epilogue, before its only rounding, if torch's operator accepts a
bias.

A GEMM that the device cannot run natively runs through `scaled_matmul_reference` if emulation was
requested, and is refused otherwise. `check_device` refuses it once at conversion, so a step needs
no check. The CPU always emulates: torch's operator runs tensorwise and rowwise there, and the
reference runs block scales.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType
from torch.utils.flop_counter import register_flop_formula

from torch_fp8.autograd.current_pass import is_traced
from torch_fp8.ops import refused_rows, registry
from torch_fp8.ops.gemm_operand import aligned_operand, operand, with_columns
from torch_fp8.ops.hardware import _cuda_version
from torch_fp8.ops.quantize import QuantizedTensor, dequantize
from torch_fp8.ops.registry import define, is_watched
from torch_fp8.quantization.formats import GEMM_ALIGNMENT
from torch_fp8.quantization.payload_shape import is_aligned
from torch_fp8.quantization.recipe import Granularity

# torch 2.11 has this operator for CUDA only; on its CPU the predecessor runs, tensorwise.
_CPU_HAS_OPERATOR = torch.__version__ >= "2.12"
_CPU_NATIVE = ("tensorwise", "rowwise") if _CPU_HAS_OPERATOR else ("tensorwise",)

_SCALING: dict[str, list[int]] = {
    "tensorwise": [ScalingType.TensorWise.value],
    "rowwise": [ScalingType.RowWise.value],
    "block_1x128": [ScalingType.BlockWise1x128.value],
    "block_128x128": [ScalingType.BlockWise128x128.value],
    "block_1x32": [ScalingType.BlockWise1x32.value],
}
_SWIZZLE: list[int] = [SwizzleType.SWIZZLE_32_4_4.value]
_NO_SWIZZLE: list[int] = []
_ROWS_NEVER_REFUSED = 512
"""More rows than any product has that cuBLASLt is known to refuse."""


def scaled_matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    contracted: int | None = None,
    *,
    bias: Tensor | None = None,
    fast_accum: bool = False,
    emulate: bool = False,
) -> Tensor:
    """Compute ``dequantize(a) @ dequantize(b).T + bias`` on the FP8 payloads.

    Args:
        a: (R, C), possibly with additional columns of zeros.
        b: (S, C), possibly with additional columns of zeros. At most one of a and b is E5M2.
        out_dtype: float32, bfloat16 or float16.
        contracted: C, or None for the number of columns of the narrower operand.
        bias: (S,) of any floating dtype, rounded to `out_dtype`; or None.
        fast_accum: whether the tensor core accumulates in its own, narrower format.
        emulate: whether to run the reference instead of torch's operator. The CPU always uses the
            operator if it has one.
    Returns:
        (R, S) of `out_dtype`.
    """
    bias = None if bias is None else cast(bias, out_dtype)
    if contracted is None:
        contracted = min(a.qdata.shape[1], b.qdata.shape[1])
    if torch.compiler.is_dynamo_compiling() or is_watched(a.qdata):
        if not emulate and is_traced() and _is_visible(a, b, out_dtype):
            return _visible(a, b, out_dtype, fast_accum, bias)
        return _operator(*a, *b, contracted, bias, out_dtype, fast_accum, emulate)
    return _multiply(a, b, contracted, bias, out_dtype, fast_accum, emulate)


def _is_visible(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> bool:
    """Return whether a (R, C) times b (S, C)^T in a graph is ``aten::_scaled_mm``."""
    (rows, width), (cols, width_b) = a.qdata.shape, b.qdata.shape
    known_rows = rows if isinstance(rows, int) else 2  # Dynamo's least symbolic size
    if a.granularity == "rowwise":
        fits = known_rows >= _ROWS_NEVER_REFUSED and out_dtype != torch.float32
    else:
        fits = known_rows > 0 and a.granularity == "tensorwise"
    aligned = all(is_aligned(n) for n in (width, width_b, cols))
    return fits and aligned and a.granularity == b.granularity and registry.on_cuda(a.qdata)


def _visible(a: QuantizedTensor, b: QuantizedTensor, *options: Any) -> Tensor:
    out_dtype, fast_accum, bias = options
    in_gemm = bias is not None and _takes_bias(a.granularity, out_dtype)
    # Inductor cannot add dimensions to a scale () that is an element of a larger tensor.
    scales = a.scale.view(-1, 1), b.scale.view(1, -1)  # (R, 1) and (1, S), or (1, 1)
    factors = a.qdata, b.qdata.t(), *scales  # (R, C), (C, S) with strides (1, C)
    epilogue = {"bias": bias if in_gemm else None, "out_dtype": out_dtype}
    output = torch._scaled_mm(*factors, **epilogue, use_fast_accum=fast_accum)
    return output if bias is None or in_gemm else output + bias


def _multiply(
    a: QuantizedTensor,
    b: QuantizedTensor,
    contracted: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    emulate: bool,
) -> Tensor:
    """Multiply on any device; the result may be a view of a padded one."""
    rows, cols = a.qdata.shape[0], b.qdata.shape[0]  # R, S
    if not (rows and cols and contracted):
        zeros = a.qdata.new_zeros((rows, cols), dtype=out_dtype)
        return zeros if bias is None else zeros + bias
    if emulate or a.qdata.is_cpu:
        if not a.qdata.shape[1] == b.qdata.shape[1] == contracted:
            a, b = _narrowed(a, contracted), _narrowed(b, contracted)
        return _emulated(a, b, out_dtype, fast_accum, bias)
    return multiply_laid_out(a, lay_out(b, contracted), out_dtype, fast_accum, bias)


def _narrowed(x: QuantizedTensor, cols: int) -> QuantizedTensor:
    """Drop the zeros beyond `cols` columns."""
    if x.qdata.shape[1] == cols:
        return x
    return x._replace(qdata=x.qdata[:, :cols].contiguous())


def _scaled_mm_impl(*args: Any) -> Tensor:
    a, b, options = QuantizedTensor(*args[:3]), QuantizedTensor(*args[3:6]), args[6:]
    return _multiply(a, b, *options).contiguous()


define(
    "scaled_mm(Tensor a, Tensor a_scale, str a_granularity, Tensor b, Tensor b_scale, "
    "str b_granularity, SymInt contracted, Tensor? bias, ScalarType out_dtype, bool fast_accum, "
    "bool emulate) -> Tensor",
    _scaled_mm_impl,
    _scaled_mm_impl,
    lambda *args: args[0].new_empty((args[0].shape[0], args[3].shape[0]), dtype=args[8]),
)
_operator: Any = torch.ops.torch_fp8.scaled_mm.default


@register_flop_formula(torch.ops.torch_fp8.scaled_mm)
def _scaled_mm_flops(
    a_shape: tuple[int, int], *args: Any, out_shape: tuple[int, int], **_: Any
) -> int:
    """Count the product's FLOPs for ``torch.utils.flop_counter``, as for ``aten::mm``."""
    contracted: int = args[5]
    return 2 * out_shape[0] * out_shape[1] * contracted


def _emulated(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Tensor | None,
) -> Tensor:
    device_type = a.qdata.device.type
    # Both paths multiply dequantized operands, which autocast would round to bfloat16 first.
    with torch.autocast(device_type, enabled=False):
        if device_type != "cpu" or a.granularity not in _CPU_NATIVE:
            return scaled_matmul_reference(a, b, out_dtype, bias)
        if _CPU_HAS_OPERATOR:
            return _scaled_mm(a, _arguments(b), out_dtype, fast_accum, bias)
        return torch._scaled_mm(
            *(a.qdata, b.qdata.t(), a.scale, b.scale),  # (R, C), (C, S) with strides (1, C)
            bias=bias,
            out_dtype=out_dtype,
            use_fast_accum=fast_accum,
        )


def scaled_matmul_reference(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Compute ``dequantize(a) @ dequantize(b).T + bias`` in float32; round once."""
    output = dequantize(a) @ dequantize(b).t()
    return cast(output if bias is None else output + bias, out_dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.to(dtype)``, or x itself if it has this dtype.

    In a graph compiled by torch 2.11, a gradient that ends in a no-op ``.to`` reads zero.
    """
    return x if x.dtype == dtype else x.to(dtype)


# The operator's arguments for a second operand: its transpose (C, S), scales, and their kind.
_Arguments = tuple[Tensor, list[Tensor], list[int]]


class LaidOut(NamedTuple):
    """A second operand prepared for any number of GEMMs on CUDA.

    Attributes:
        operand: the operand, padded and with scales laid out.
        cols, contracted: the sizes of the product, without padding.
        arguments: the operator's arguments for it: the payload's transpose, scales and their kind.
    """

    operand: QuantizedTensor
    cols: int
    contracted: int
    arguments: _Arguments


def lay_out(b: QuantizedTensor, contracted: int) -> LaidOut:
    """Prepare b (S, C) for GEMMs on CUDA.

    Args:
        b: the second operand.
        contracted: C, without the zeros that a cast has added.
    """
    laid_out = aligned_operand(operand(b, contracted, is_b=True))
    return LaidOut(laid_out, b.qdata.shape[0], contracted, _arguments(laid_out))


def _arguments(b: QuantizedTensor) -> _Arguments:
    scale = b.scale.t() if b.granularity == "rowwise" else b.scale  # (S, 1) -> (1, S)
    return b.qdata.t(), [scale], _SCALING[b.granularity]  # (C, S), strides (1, C)


def _scaled_mm(
    a: QuantizedTensor,
    arguments: _Arguments,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Tensor | None,
) -> Tensor:
    """Call the operator behind ``F.scaled_mm``, which builds its lists in each call."""
    qdata_b, scales_b, kind_b = arguments
    swizzle = _SWIZZLE if a.granularity == "block_1x32" else _NO_SWIZZLE
    return torch._scaled_mm_v2(
        *(a.qdata, qdata_b, [a.scale], _SCALING[a.granularity], swizzle),
        *(scales_b, kind_b, swizzle, bias, out_dtype, (), fast_accum),
    )


def multiply_laid_out(
    a: QuantizedTensor,
    laid_out: LaidOut,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Tensor | None,
) -> Tensor:
    """Compute `scaled_matmul` on CUDA without checking what the device can run.

    Args:
        a: (R, C), with at least one row.
        laid_out: the result of `lay_out`.
        out_dtype, fast_accum: see `scaled_matmul`.
        bias: (S,) of `out_dtype`, or None.
    """
    b, cols, contracted, _ = laid_out
    (rows, width), granularity, native_dtype = a.qdata.shape, a.granularity, out_dtype
    if granularity == "rowwise" and out_dtype == torch.float32:
        native_dtype = _rowwise_dtype(a.qdata.device)
    in_gemm = bias is not None and _takes_bias(granularity, out_dtype)
    fits = width == contracted and contracted % GEMM_ALIGNMENT == 0
    as_it_is = fits and granularity == "tensorwise"
    laid_out_a = a if as_it_is else operand(a, contracted, is_b=False)
    in_epilogue = bias if in_gemm else None
    if in_epilogue is not None and b.qdata.shape[0] != cols:
        in_epilogue = F.pad(in_epilogue, (0, b.qdata.shape[0] - cols))  # (S,) -> padded
    options = native_dtype, fast_accum, in_epilogue
    known = refused_rows.padded
    multiple = known.get(refused_rows.sizes(laid_out_a, b, *options)) if known else None
    if multiple is not None:
        output = _padded_product(multiple, a, laid_out, *options)
    else:
        try:
            output = _product(laid_out_a, laid_out, *options)
        except RuntimeError as refusal:
            kind, shape = refused_rows.sizes(laid_out_a, b, *options), laid_out_a.qdata.shape
            output = refused_rows.find_rows(
                refusal, kind, shape, lambda m: _padded_product(m, a, laid_out, *options)
            )
    if output.shape != (rows, cols):
        output = output[:rows, :cols]  # a view, with the padded row stride
    if native_dtype != out_dtype:
        output = output.to(out_dtype)
    return output if bias is None or in_gemm else output + bias


def _product(a: QuantizedTensor, b: LaidOut, *options: Any) -> Tensor:
    return _scaled_mm(aligned_operand(a), b.arguments, *options)


def _padded_product(multiple: int, a: QuantizedTensor, b: LaidOut, *options: Any) -> Tensor:
    """Multiply with rows padded to a multiple of a number, and contracted columns to one of 128."""
    contracted = refused_rows.whole(b.contracted)
    a = operand(a, contracted, is_b=False, row_multiple=multiple)
    if b.operand.qdata.shape[1] != contracted:
        # Block scales are laid out for multiples of 128 columns.
        qdata = with_columns(b.operand.qdata, contracted)
        b = b._replace(
            operand=b.operand._replace(qdata=qdata), arguments=(qdata.t(), *b.arguments[1:])
        )
    return _product(a, b, *options)


@functools.cache
def _rowwise_dtype(device: torch.device) -> torch.dtype:
    """Return the output dtype of a rowwise GEMM whose result must be float32.

    cuBLASLt writes float32, but torch calls it only on sm_90 with CUDA 12.9 or later. CUTLASS's
    kernel for all other devices writes bfloat16 (``_scaled_mm_cuda_v2`` in torch's ScaledBlas.cpp).
    """
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return torch.float32 if hopper and _cuda_version() >= (12, 9) else torch.bfloat16


def _takes_bias(granularity: Granularity, out_dtype: torch.dtype) -> bool:
    """Return whether the CUDA operator adds a bias of the output's dtype.

    The operator refuses a bias with a float32 output. It is not documented whether cuBLASLt accepts
    a bias with block scales; this has to be tried on a GPU.
    """
    return granularity in ("tensorwise", "rowwise") and out_dtype != torch.float32
