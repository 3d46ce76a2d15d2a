"""Results of operators on fake tensors, known from an equal call.

A recurrence in plain torch calls the same operators thousands of times with the same shapes.
FakeTensorMode spends most of its time for each on the key of its cache, which allows for symbolic
sizes. A step has none, so shapes, strides and dtypes are key enough.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from torch_fp8.tensor.base import map_tensors

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype."""
_known: dict[Any, tuple[bool, list[Layout]] | None] = {}
"""Whether a call has several results, and the layout of each, or None to run the operator. All
steps share it, because a layout does not depend on the step.
"""
_blank: dict[str, None] = {}
"""The attributes of a FakeTensor without values that are None."""


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator; only the first of equal calls on fake tensors runs it."""
    first = args[0] if args else None
    if not isinstance(first, FakeTensor) or first.constant is not None:
        return func(*args, **kwargs)
    if func is torch.ops.aten.copy_.default:
        return first  # there are no values
    if (func.is_view or func is _UNSAFE_VIEW) and not kwargs:
        # As FakeTensorMode does it, without its cache, whose keys take longer.
        with in_kernel_invocation_manager(first.fake_mode):
            out = func(*args)
        return map_tensors(out, lambda view: _fake(view, first))
    if func.namespace not in ("aten", "torch_fp8") or func._schema.is_mutable:
        return func(*args, **kwargs)
    key = _key_of((func, *args, *kwargs.items()))
    known = _known.get(key)
    if known is not None:
        several, layouts = known
        results = tuple([_empty(first, *layout) for layout in layouts])
        return results if several else results[0]
    out = func(*args, **kwargs)
    if key is not None and key not in _known:
        _known[key] = _new_layouts(out, first, (*args, *kwargs.values()))
    return out


def _key_of(value: Any) -> Any:
    """Describe an argument, or None if its description does not decide on the result's layout."""
    if type(value) is FakeTensor:
        if value.constant is not None:
            return None
        return value.dtype, value.shape, value.stride(), value.fake_device
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (list, tuple)):
        keys = tuple([_key_of(each) for each in value])
        return None if None in keys else keys
    return type(value), value  # because 1 == 1.0 == True


def _empty(
    like: FakeTensor, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype
) -> FakeTensor:
    """Return a new tensor, unseen by modes, in the mode and on the device of `like`."""
    with torch._C._DisableTorchDispatch():
        return _fake(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), like)


def _fake(tensor: Tensor, like: FakeTensor) -> FakeTensor:
    """Make a FakeTensor of a tensor on the meta device, faster than its constructor does."""
    if not _blank:
        first = FakeTensor(like.fake_mode, tensor, like.fake_device)
        _blank.update({name: None for name, value in vars(first).items() if value is None})
        return first
    options = {"dispatch_device": True, "device_for_backend_keys": like.fake_device}
    new = Tensor._make_subclass(FakeTensor, tensor, tensor.requires_grad, **options)
    vars(new).update(_blank)
    new.fake_mode, new.fake_device = like.fake_mode, like.fake_device
    return new


def _new_layouts(
    out: Any, first: FakeTensor, args: tuple[Any, ...]
) -> tuple[bool, list[Layout]] | None:
    """Describe results, or None unless each is a new tensor, without values, on the device."""
    seen: list[int] = []

    def see(value: Any) -> None:
        if isinstance(value, Tensor):
            seen.append(id(value.untyped_storage()))

    map_tensors(args, see)
    layouts: list[Layout] = []
    for result in out if isinstance(out, (tuple, list)) else (out,):
        if type(result) is not FakeTensor or result.fake_device != first.fake_device:
            return None
        storage = result.untyped_storage()
        layout = result.shape, result.stride(), result.dtype
        if result.constant is not None or result.storage_offset() or id(storage) in seen:
            return None
        if _empty(first, *layout).untyped_storage().nbytes() != storage.nbytes():
            return None
        seen.append(id(storage))
        layouts.append(layout)
    return isinstance(out, tuple), layouts
