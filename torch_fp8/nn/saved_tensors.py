"""Saving the tensors of an autograd function under names, including weights in two halves."""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.quantization.split_float import split
from torch_fp8.tensor.encoded import plain
from torch_fp8.tensor.split_weight import SplitWeight


def save_by_name(ctx: Any, tensors: dict[str, Tensor | None]) -> None:
    """Save tensors for backward under names, without those that are None.

    Names are needed because torch.compile of torch 2.11 shifts saved tensors if one is None.
    Autograd does not save tensors that inference mode created: a copy is saved. torch's layers
    train such a weight under autocast, because they save their cast copy of it.
    """
    is_eager = not torch.compiler.is_compiling()
    present = {
        name: t.clone() if is_eager and t.is_inference() else t
        for name, t in tensors.items()
        if t is not None
    }
    ctx.saved_names = tuple(present)
    ctx.split_names = [name for name, t in present.items() if isinstance(t, SplitWeight)]
    ctx.save_for_backward(*present.values())


def saved_by_name(ctx: Any) -> dict[str, Tensor]:
    """Return the tensors of `save_by_name`, with the values that forward used.

    Forward casts the BF16 half of a `SplitWeight`. Hooks that copy (`save_on_cpu`) return its
    float32 value instead, which is split again. Ties round up, so the half is the same.
    """
    saved = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))
    for name in ctx.split_names:
        if not isinstance(saved[name], SplitWeight):
            saved[name] = split(plain(saved[name]), bits=0)[0]
    return saved
