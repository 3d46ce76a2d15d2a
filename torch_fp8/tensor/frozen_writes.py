"""Checks of writes to weights that are stored as FP8 only, so that no change is silently lost.

A copy rounds its source to FP8. A change (``add_``, ``mul_``, ...) may be smaller than the steps of
E4M3, which are 6 to 12 % of a value, and then leaves the weight as it was. An adapter's delta is
such a change, and subtracting it again would not restore the bytes.
"""

import inspect
import traceback
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.tensor.frozen_payload import FrozenPayload

_MERGES = ("merge", "unmerge")
"""Methods of PEFT's layers that write to the weight of their base layer."""


def refuse_merge(payload: FrozenPayload) -> None:
    """Refuse that PEFT alone merges an adapter into the weight, before anything changes.

    If `accelerate_fp8` is imported, it has made the weight float32 before.

    Raises:
        RuntimeError: the caller merges an adapter into the weight, or unmerges one.
    """
    owner = None if payload.owner is None else payload.owner()
    if owner is None:
        return
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_code.co_name in _MERGES:
            layer = frame.f_locals.get("self")
            if isinstance(layer, nn.Module) and any(m is owner for m in layer.modules()):
                raise RuntimeError(
                    f"{payload.name} is stored in FP8 only, and "
                    f"{type(layer).__name__}.{frame.f_code.co_name}() writes an adapter into its "
                    "FP8 values: small deltas would be rounded away, and unmerging would not give "
                    "the weight back. Merging goes through float32 and BF16 after `import "
                    "accelerate_fp8`, which torch's autoload does unless "
                    "TORCH_DEVICE_BACKEND_AUTOLOAD is 0; or restore the weights' own dtype first: "
                    "torch_fp8.thaw(model)"
                )


def write_change(payload: FrozenPayload, values: Tensor, func: Any) -> None:
    """Write `values`, and warn if most of the change was smaller than FP8's steps.

    Args:
        payload: payload to write to.
        values: (R, C) float32, new values.
        func: operator that computed `values` from the weight; copies are not checked.
    """
    if values.is_meta or "copy" in func.__name__:
        payload.write(values)
        return
    before = payload.dequantize(torch.float32)
    payload.write(values)
    wanted = values - before
    change = payload.dequantize(torch.float32).sub_(before)
    if (wanted * change).sum() < 0.5 * wanted.square().sum():
        _warn_of_loss(payload, func)


def _warn_of_loss(payload: FrozenPayload, func: Any) -> None:
    """Warn once for all weights that were frozen together."""
    owner = None if payload.owner is None else payload.owner()
    notice = getattr(owner, "thaw_notice", None)
    if notice is not None and notice.lost:
        return
    warnings.warn(
        f"{payload.name} is stored in FP8 only, and {func.overloadpacket.__name__} changed it by "
        "less than the steps between its values, which are 6 to 12 % of each: less than half of "
        "the change is left, and equally small changes, to this or other weights, will be lost "
        "too. Make larger changes in fewer steps, or keep the weights in their own dtype: "
        "FP8Config(frozen_weights='keep') or torch_fp8.thaw(model)",
        stacklevel=3,
    )
    if notice is not None:
        notice.lost = True
