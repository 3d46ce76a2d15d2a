"""The forward product in BF16, with the FP8 backward of a layer unchanged.

A layer whose recipe has `bf16_forward` multiplies input and weight as a stock layer would, and
saves the same payloads for backward as in FP8, so that the memory of activations does not grow. See
`torch_fp8.set_forward_precision`.

Legend: M tokens, K in, N out, R rows of all experts, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.autograd.function import reshaped
from torch_fp8.tensor.quantizer import InputPayloads, Quantizers, matrix
from torch_fp8.tensor.split_weight import stored


def linear_in_bf16(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: torch.Size,
    quantizers: Quantizers,
    *,
    wgrad: bool,
    fp8_wgrad: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, InputPayloads]:
    """Compute ``y = x w^T + b`` (..., N) in `dtype`, and what backward reads of x.

    Args:
        x, weight, bias, shape: arguments of `torch_fp8.nn.linear_function.linear`.
        quantizers: casts of the operands.
        wgrad, fp8_wgrad: see `torch_fp8.tensor.quantizer.quantize_input`.
        dtype: autocast's dtype, or that of x.
    """
    rows = matrix(x).to(dtype)
    # In 16 bits the BF16 half, which FP8 casts, too; in float32 the whole weight.
    w = (stored(weight) if dtype.itemsize == 2 else weight).to(dtype)
    w = w.t() if quantizers.weight.transposed else w  # (N, K)
    y = F.linear(rows, w, None if bias is None else bias.to(dtype))
    y = reshaped(y, (*shape[:-1], y.shape[-1]))  # (M, N) -> (..., N)
    if not fp8_wgrad:
        return y, InputPayloads(None, rows if wgrad else None, None, None)
    _, col, _ = quantizers.input(x, rowwise=False, columnwise=True)
    assert col is not None
    if quantizers.observer is not None:
        quantizers.observer.input(x, None, col)
    return y, InputPayloads(None, col.qdata, col.scale, None)


def grouped_in_bf16(rows: Tensor, weight: Tensor, offs: Tensor, options: Any) -> Tensor:
    """Compute ``y = x w_e^T`` (R, N) in BF16 for the rows of each expert e; others are zero.

    Args:
        rows: x (R, K).
        weight: (E, N, K), or (E, K, N) if transposed.
        offs: ends of the groups (E,) int32.
        options: `torch_fp8.nn.grouped_linear_function.GroupedOptions`.
    """
    w = stored(weight).to(torch.bfloat16)
    w = w if options.transposed else w.transpose(1, 2)  # (E, K, N)
    y = F.grouped_mm(rows.to(torch.bfloat16), w, offs=offs)
    index = torch.arange(len(y), device=y.device, dtype=torch.int32)
    return torch.where((index < offs[-1])[:, None], y, 0)
