"""What autograd keeps between forward and backward: what its hooks see, and what lives."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SavedBytes:
    """The bytes of the distinct storages that were saved."""

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self._excluded = {_key(tensor) for tensor in excluded}
        self._sizes: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def note(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor; the pack hook keeps it alive, so that no address is used twice."""
        key = _key(tensor)
        if key not in self._excluded and key not in self._sizes:
            self._sizes[key] = tensor.untyped_storage().nbytes()
            self.tensors.append(tensor.detach())
        return tensor

    @property
    def total(self) -> int:
        """The bytes in all."""
        return sum(self._sizes.values())


@contextmanager
def count_saved(excluded: Iterable[Tensor] = ()) -> Iterator[SavedBytes]:
    """Count what is saved within.

    Args:
        excluded: tensors that are there anyway: parameters.
    """
    saved = SavedBytes(excluded)
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that operators have made within and that live now."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._storages[_key(leaf)] = StorageWeakRef(storage), storage.nbytes()
        return results

    @property
    def total(self) -> int:
        """The bytes now."""
        return sum(size for ref, size in self._storages.values() if not ref.expired())


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
