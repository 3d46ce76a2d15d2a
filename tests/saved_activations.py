"""What autograd keeps between forward and backward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
