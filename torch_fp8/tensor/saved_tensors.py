"""Tensors that an autograd function saves for backward, by name."""

from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.quantization.split_float import split
from torch_fp8.tensor import encoded
from torch_fp8.tensor.split_weight import SplitWeight

_PLAIN = (Tensor, nn.Parameter)


def save_by_name(ctx: Any, tensors: dict[str, Tensor | None]) -> None:
    """Save tensors for backward under names, without those that are None.

    Names are needed because torch.compile of torch 2.11 shifts saved tensors if one is None. A
    graph's backward takes scales from their table again (`scale_in_table`). Autograd does not save
    tensors that inference mode created: a copy is saved. torch's layers train such a weight under
    autocast, because they save their cast copy of it.
    """
    present = {name: t for name, t in tensors.items() if t is not None}
    if not torch.compiler.is_dynamo_compiling():
        for name, t in present.items():
            if t.is_inference():
                present[name] = t.clone()
    ctx.again = {}
    if torch.compiler.is_compiling():
        ctx.again = {name: t.fp8_again for name, t in present.items() if hasattr(t, "fp8_again")}
        present = {name: t for name, t in present.items() if name not in ctx.again}
    ctx.split_names = [
        name for name, t in present.items() if type(t) not in _PLAIN and isinstance(t, SplitWeight)
    ]
    ctx.saved_names = tuple(present)
    ctx.save_for_backward(*present.values())


def saved_by_name(ctx: Any) -> dict[str, Tensor]:
    """Return the tensors of `save_by_name`, with the values that forward used.

    Forward casts the BF16 half of a `SplitWeight`. Hooks that copy (`save_on_cpu`) return its
    float32 value instead, which is split again. Ties round up, so the half is the same.
    """
    saved = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))
    saved |= {name: again() for name, again in ctx.again.items()}
    for name in ctx.split_names:
        if not isinstance(saved[name], SplitWeight):
            saved[name] = split(encoded.plain(saved[name]), bits=0)[0]
    return saved
