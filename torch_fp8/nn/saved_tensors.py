"""Tensors that an autograd function saves under names, weights in two halves among them."""

from typing import Any

from torch import Tensor

from torch_fp8.quantization.split_float import split
from torch_fp8.tensor.split_weight import SplitWeight


def save_by_name(ctx: Any, tensors: dict[str, Tensor | None]) -> None:
    """Save tensors for backward; those that are None are left out.

    By name: torch.compile of torch 2.11 shifts saved tensors when one of them is None.
    """
    present = {name: t for name, t in tensors.items() if t is not None}
    ctx.saved_names = tuple(present)
    ctx.split_names = [name for name, t in present.items() if isinstance(t, SplitWeight)]
    ctx.save_for_backward(*present.values())


def saved_by_name(ctx: Any) -> dict[str, Tensor]:
    """Return what `save_by_name` saved, as forward cast it.

    Forward casts the BF16 half of a `SplitWeight`. Of hooks that copy (`save_on_cpu`) its float32
    value comes back, which is split again: ties round up, so that the half is the same.
    """
    saved = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))
    for name in ctx.split_names:
        if not isinstance(saved[name], SplitWeight):
            saved[name] = split(saved[name], bits=0)[0]
    return saved
