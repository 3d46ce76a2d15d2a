"""``torch._scaled_mm_v2`` in float64, with the demands of torch's CUDA operator on its operands.

The demands are those of ScaledBlas.cpp of torch 2.11 to 2.13: layouts, sizes, types, and shapes and
strides of scales. Other operands raise what they raise there, a ValueError that says which demand.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_ROW, _TENSOR = ScalingType.RowWise.value, ScalingType.TensorWise.value
_SMALL, _SQUARE = ScalingType.BlockWise1x128.value, ScalingType.BlockWise128x128.value
_MX = ScalingType.BlockWise1x32.value
_PAIRS = {(_TENSOR, _TENSOR), (_ROW, _ROW), (_MX, _MX)}
_PAIRS |= {(_SMALL, _SMALL), (_SMALL, _SQUARE), (_SQUARE, _SMALL)}


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scales_a: list[Tensor],
    kinds_a: list[int],
    swizzle_a: list[int],
    scales_b: list[Tensor],
    kinds_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    contraction: tuple[int, ...] = (),
    fast_accum: bool = False,
) -> Tensor:
    """Multiply a (M, K) by b (K, N), each times its scales; round once.

    Raises:
        ValueError: the operator would refuse the operands.
    """
    (kind_a,), (kind_b,), (scale_a,), (scale_b,) = kinds_a, kinds_b, scales_a, scales_b
    _require_operands(a, b, bias, out_dtype)
    _require((kind_a, kind_b) in _PAIRS, f"scaling {kind_a} with {kind_b}")
    if kind_a == _MX:
        swizzled = [SwizzleType.SWIZZLE_32_4_4.value]
        _require(swizzle_a == swizzle_b == swizzled, "scales of 1x32 are swizzled")
    left = _values(a, scale_a, kind_a, "a")
    right = _values(b.t(), scale_b.t() if kind_b == _ROW else scale_b, kind_b, "b")
    product = left @ right.t()
    return (product if bias is None else product + bias.double()).to(out_dtype)


def exact_product(
    a: Any, b: Any, out_dtype: torch.dtype, fast_accum: bool, bias: Tensor | None
) -> Tensor:
    """Multiply quantized tensors on the CPU in float64; round once."""
    from torch_fp8.ops.quantize import dequantize

    product = dequantize(a).double() @ dequantize(b).double().t()
    return (product if bias is None else product + bias.double()).to(out_dtype)


def _require(condition: Any, demand: str) -> None:
    if not condition:
        raise ValueError(f"the CUDA operator refuses this product: {demand}")


def _require_operands(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    _require(a.ndim == 2 and b.ndim == 2, "operands are matrices")
    (_, contracted), (inner, cols) = a.shape, b.shape
    _require(contracted == inner, f"sizes {tuple(a.shape)} and {tuple(b.shape)}")
    _require(a.stride(1) == 1 and a.stride(0) >= contracted, "a is row-major")
    _require(b.stride(0) == 1 and b.stride(1) >= contracted, "b is column-major")
    _require(contracted % 16 == 0, f"K is a multiple of 16, not {contracted}")
    _require(cols % 16 == 0, f"N is a multiple of 16, not {cols}")
    _require(a.dtype in _FP8 and b.dtype in _FP8, f"FP8, not {a.dtype} and {b.dtype}")
    _require(torch.float8_e4m3fn in (a.dtype, b.dtype), "at most one operand is E5M2")
    _require(a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0, "addresses are multiples of 16")
    if bias is not None:
        _require(bias.numel() == cols, f"a bias of {cols} elements, not {bias.numel()}")
        _require(out_dtype != torch.float32, "no bias with a float32 output")
        _require(bias.dtype == out_dtype, f"a bias of {out_dtype}, not {bias.dtype}")


def _values(x: Tensor, scale: Tensor, kind: int, name: str) -> Tensor:
    """Return a payload (R, K) times its scales, float64."""
    (rows, cols), blocks = x.shape, -(-x.shape[1] // 128)
    values = x.double()
    if kind == _MX:
        return values * _unswizzled(scale, rows, -(-cols // 32)).repeat_interleave(32, 1)[:, :cols]
    _require(scale.dtype == torch.float32, f"scale_{name} is float32")
    if kind == _TENSOR:
        _require(scale.numel() == 1, f"scale_{name} has one element")
        return values * scale.double()
    if kind == _ROW:
        _require(scale.shape == (rows, 1), f"scale_{name} has {rows} elements")
        _require(rows == 1 or scale.stride(0) == 1, f"scale_{name} is dense")
        return values * scale.double()
    shape = (rows, blocks) if kind == _SMALL else (blocks + -blocks % 4, -(-rows // 128))
    demand = f"scale_{name} is {shape} with strides (1, {shape[0]})"
    actual = f"{tuple(scale.shape)} with strides {scale.stride()}"
    _require(scale.shape == shape and scale.stride(0) == 1, f"{demand}, not {actual}")
    dense = scale.stride(1) == shape[0] or (shape[1] == 1 and scale.stride(1) == 1)
    _require(dense, f"{demand}, not {actual}")
    if kind == _SQUARE:
        scale = scale.t()[:, :blocks].repeat_interleave(128, 0)[:rows]
    return values * scale.double().repeat_interleave(128, 1)[:, :cols]


def _unswizzled(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Return E8M0 scales, laid out in tiles of 128 rows and 4 blocks, as (rows, blocks)."""
    tiles, across = -(-rows // 128), -(-blocks // 4)
    _require(scale.dtype == torch.float8_e8m0fnu, "scales of 1x32 are E8M0")
    _require(scale.is_contiguous(), "scales of 1x32 are contiguous")
    _require(scale.numel() == tiles * across * 512, f"{tiles * across * 512} scales of 1x32")
    laid_out = scale.float().double().view(tiles, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return laid_out.reshape(128 * tiles, 4 * across)[:rows, :blocks]
