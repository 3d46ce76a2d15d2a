"""Which bytes of the tensors that torch has allocated have been written."""

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten: Any = torch.ops.aten
_ALLOCATE = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class Allocations(TorchDispatchMode):
    """Sees allocations without values, until a kernel or an operator of torch writes them.

    What an operator of torch reads is not looked at: it is the kernels' reads that are checked.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[int, np.ndarray] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in _ALLOCATE:
            self._begin(results)
        elif self._written:
            schema = func._schema
            if schema.is_mutable:
                leaves = tree_leaves((args, kwargs))
                for x in leaves:
                    self._fill(x)
            for x, returned in zip(tree_leaves(results), schema.returns, strict=False):
                if returned.alias_info is None:
                    self._forget(x)
        return results

    def written(self, x: Tensor) -> tuple[np.ndarray | None, int]:
        """Return for each byte of a tensor's allocation whether it has been written.

        Returns:
            The bytes, None if all have been, and the address of the first.
        """
        first = x.untyped_storage().data_ptr()
        known = self._written.get(first)
        if known is not None and known.all():
            del self._written[first]
            known = None
        return known, first

    def _begin(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        first, size = storage.data_ptr(), storage.nbytes()
        if size and x.device.type == "cpu":
            known = self._written[first] = np.zeros(size, np.uint8)
            weakref.finalize(x, self._end, first, known)

    def _end(self, first: int, known: np.ndarray) -> None:
        if self._written.get(first) is known:
            del self._written[first]

    def _fill(self, x: Any) -> None:
        if isinstance(x, Tensor) and x.device.type == "cpu":
            known = self._written.get(x.untyped_storage().data_ptr())
            if known is not None and x.numel():
                start = x.storage_offset() * x.itemsize
                known[start : start + span(x)] = 1

    def _forget(self, x: Any) -> None:
        if isinstance(x, Tensor) and x.device.type == "cpu":
            self._written.pop(x.untyped_storage().data_ptr(), None)


def span(x: Tensor) -> int:
    if not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return int((last + 1) * x.itemsize)
