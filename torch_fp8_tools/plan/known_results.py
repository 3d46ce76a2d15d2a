"""Results of operators on fake tensors, known from an equal call.

A recurrence in plain torch calls the same operators thousands of times with the same shapes.
FakeTensorMode spends most of its time for each on the key of its cache, which allows for symbolic
sizes. A step has none, so shapes, strides and dtypes are key enough.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fp8.tensor.base import map_tensors

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_NAMESPACES = ("aten", "torch_fp8")
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype."""
_BLANK: dict[str, None] = {}
"""The attributes of a FakeTensor without values that are None."""


class KnownResults(TorchDispatchMode):
    """Calls operators on fake tensors; of equal calls only the first runs the operator.

    All steps share the results, because a layout does not depend on the step.
    """

    # Whether there are several results, and the layout of each, or None to run the operator.
    _known: ClassVar[dict[Any, tuple[bool, list[Layout]] | None]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check at each call takes as long as a view

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if not isinstance(first, FakeTensor):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and first.constant is None:
            return first  # there are no values
        if (func.is_view or func is _UNSAFE_VIEW) and not kwargs and first.constant is None:
            return _view(func, first, args)
        kwargs = kwargs or {}
        if func.namespace not in _NAMESPACES or func._schema.is_mutable:
            return func(*args, **kwargs)
        key = key_of((func, *args, *kwargs.items()))
        known = self._known.get(key)
        if known is not None:
            several, layouts = known
            results = tuple([empty(first, *layout) for layout in layouts])
            return results if several else results[0]
        out = func(*args, **kwargs)
        if key is not None and key not in self._known:
            self._known[key] = new_layouts(out, first, (*args, *kwargs.values()))
        return out


def _view(func: Any, base: FakeTensor, args: tuple[Any, ...]) -> Any:
    """Return views as FakeTensorMode does, without its cache, whose keys take longer."""
    with in_kernel_invocation_manager(base.fake_mode):
        out = func(*args)
    if isinstance(out, Tensor):
        return fake(out, base)
    return map_tensors(out, lambda view: fake(view, base))


def key_of(value: Any) -> Any:
    """Describe an argument, or None if its description does not decide on the result's layout."""
    if type(value) is FakeTensor:
        if value.constant is not None:
            return None
        return value.dtype, value.shape, value.stride(), value.fake_device
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (list, tuple)):
        keys = tuple([key_of(each) for each in value])
        return None if None in keys else keys
    return type(value), value  # because 1 == 1.0 == True


def layout_of(tensor: Tensor) -> Layout:
    """Return a tensor's layout."""
    return tensor.shape, tensor.stride(), tensor.dtype


def empty(
    like: FakeTensor, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype
) -> FakeTensor:
    """Return a new tensor, unseen by modes, in the mode and on the device of `like`."""
    with torch._C._DisableTorchDispatch():
        empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return fake(empty, like)


def fake(tensor: Tensor, like: FakeTensor) -> FakeTensor:
    """Make a FakeTensor of a tensor on the meta device, faster than its constructor does.

    Args:
        tensor: a tensor on the meta device.
        like: a FakeTensor with the same mode and device.
    """
    if not _BLANK:
        first = FakeTensor(like.fake_mode, tensor, like.fake_device)
        _BLANK.update({name: None for name, value in vars(first).items() if value is None})
        return first
    new: FakeTensor = Tensor._make_subclass(
        FakeTensor,
        tensor,
        tensor.requires_grad,
        dispatch_device=True,
        device_for_backend_keys=like.fake_device,
    )
    vars(new).update(_BLANK)
    new.fake_mode, new.fake_device = like.fake_mode, like.fake_device
    return new


def new_layouts(
    out: Any, first: FakeTensor, args: tuple[Any, ...]
) -> tuple[bool, list[Layout]] | None:
    """Describe results, or None unless each is a new tensor, without values, on the device."""
    results = out if isinstance(out, (tuple, list)) else (out,)
    seen: list[int] = []

    def see(value: Any) -> None:
        if isinstance(value, Tensor):
            seen.append(id(value.untyped_storage()))

    map_tensors(args, see)
    layouts: list[Layout] = []
    for result in results:
        if type(result) is not FakeTensor or result.fake_device != first.fake_device:
            return None
        layout, storage = layout_of(result), result.untyped_storage()
        if result.constant is not None or result.storage_offset() or id(storage) in seen:
            return None
        if empty(first, *layout).untyped_storage().nbytes() != storage.nbytes():
            return None
        seen.append(id(storage))
        layouts.append(layout)
    return isinstance(out, tuple), layouts
