"""Checks of a layer's input and weight before they are multiplied."""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.quantization.formats import CAST_DTYPES


def check_input(fp8: Any, input: Tensor, weight: Tensor) -> None:
    """Check that the layer can multiply an input.

    Args:
        fp8: state of the layer.
        input: input of the layer.
        weight: (N, K), or (K, N) if `fp8.transposed`.
    Raises:
        TypeError: input or weight has another dtype, or torchao has quantized the weight.
        ValueError: the last dimension of the input is not K, or it is on another device.
    """
    shape, dtype = input.shape, input.dtype
    if dtype not in CAST_DTYPES:
        raise TypeError(
            f"FP8 linear '{fp8.name}' takes float32, bfloat16 or float16 input, got {dtype}; cast "
            f"it, or keep the module in high precision with FP8Config(skip=('{fp8.name}',))"
        )
    if weight.dtype not in CAST_DTYPES:
        raise TypeError(
            f"the weight of FP8 linear '{fp8.name}' is {weight.dtype}, as model.double() "
            "makes it; FP8 GEMMs take float32, bfloat16 or float16: call model.float(), or "
            "torch_fp8.revert(model) first"
        )
    compiling = torch.compiler.is_compiling()
    if not compiling and type(weight).__module__.startswith("torchao."):
        raise TypeError(
            f"the weight of FP8 linear '{fp8.name}' is torchao's {type(weight).__name__}: call "
            "torch_fp8.revert(model) before torchao's quantize_(model)"
        )
    features = weight.shape[0 if fp8.transposed else 1]
    if not shape or shape[-1] != features:
        raise ValueError(
            f"FP8 linear '{fp8.name}' takes inputs (..., {features}), got {tuple(shape)}"
        )
    if input.device != weight.device:
        raise ValueError(
            f"FP8 linear '{fp8.name}' is on {weight.device}, but its input is on {input.device}; "
            "move one of them"
        )
