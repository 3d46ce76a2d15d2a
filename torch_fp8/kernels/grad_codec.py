"""8-bit gradients on CUDA: the twin of `torch_fp8.ops.grad_codec`, byte for byte.

Legend: codes (R, K) uint8 and scales (R, ceil(K / 32)) uint8 of `formats.GRADIENT`. All tensors are
contiguous. Codes are unspecified in groups whose scale is NaN.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.grad_codec_kernels import decode_gradient_kernel, encode_gradient_kernel
from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.quantization.block_scaled import num_groups
from torch_fp8.quantization.formats import GROUP_SIZE

GROUPS, ODD_GROUPS = 64, 16
# Groups per tile: 16 elements for each thread of four warps, in accesses of 16 bytes; 4 if elements
# move one by one, each with an address and a mask.
WARPS = 4


def encode_gradient(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    multiplier: Tensor | None,
    keys: tuple[int, int],
) -> None:
    """Encode a gradient with stochastic rounding, or its sum with the stored one.

    Args:
        x: (R, K) bfloat16 or float32.
        qdata, scale: codes and scales of an (R, K) gradient, overwritten; the result's multiplier
            is 1.
        multiplier: () float32 multiplier of the stored gradient, to which x is added; not written.
            None: encode x alone.
        keys: keys of the random words; an element's word depends on its index in x.
    """
    if not x.numel():
        return
    layout, groups = _layout(x, qdata)
    count = x.shape[0] * num_groups(x.shape[1])
    with torch.cuda.device_of(x):
        encode_gradient_kernel[(cdiv(count, groups),)](
            x,
            qdata,
            scale,
            scale if multiplier is None else multiplier,
            count,
            x.shape[1],
            *keys,
            ACCUMULATE=multiplier is not None,
            LAYOUT=layout,
            GROUPS=groups,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def dequantize_gradient(
    qdata: Tensor, scale: Tensor, multiplier: Tensor, dtype: torch.dtype
) -> Tensor:
    """Decode codes and scales, times `multiplier`, to (R, K) bfloat16 or float32."""
    out = torch.empty(qdata.shape, dtype=dtype, device=qdata.device)
    if out.numel():
        layout, groups = _layout(out, qdata)
        count = qdata.shape[0] * num_groups(qdata.shape[1])
        with torch.cuda.device_of(out):
            decode_gradient_kernel[(cdiv(count, groups),)](
                qdata,
                scale,
                multiplier,
                out,
                count,
                qdata.shape[1],
                LAYOUT=layout,
                GROUPS=groups,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )
    return out


def _layout(dense: Tensor, qdata: Tensor) -> tuple[str, int]:
    """Choose the layout of `kernels.block_layout` and the groups of a tile."""
    assert dense.is_contiguous()
    assert qdata.is_contiguous()
    cols = dense.shape[1]
    if cols % 16 or dense.data_ptr() % 16 or qdata.data_ptr() % 16:
        return "any", ODD_GROUPS
    return "flat" if cols % GROUP_SIZE == 0 else "rows", GROUPS
