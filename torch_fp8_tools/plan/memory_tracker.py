"""Peak memory by category: every storage that operators create is tracked until it is freed.

The tracker works on CUDA, on the CPU, and on fake tensors, which have shapes but no memory, so a
peak can be counted without a GPU. It does not see memory that kernels allocate within an operator
(on CUDA, compare with the allocator's own peak), except the logits of a chunk in the loss head.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fp8.ops.linear_cross_entropy import workspace_of
from torch_fp8.tensor.base import map_tensors

_LOSS = torch.ops.torch_fp8.linear_softmax_loss.default
CATEGORIES = ("weights", "residuals", "gradients", "states", "saved activations", "workspace")


class MemoryTracker(TorchDispatchMode):
    """Live and peak bytes by category.

    A storage is workspace until it is categorized by `assign`, by the saved-tensor hooks that
    entering the tracker sets, or as the gradient of one of the given parameters.

    Attributes:
        current: the live bytes by category.
        peak: the bytes by category when their sum was largest.
        resizable: groups of storages that are resized together, which no operator shows. The first
            of a group shows its size (`see_resized`).
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        super().__init__()
        self.current = dict.fromkeys(CATEGORIES, 0)
        self.peak = dict(self.current)
        self.resizable: list[list[torch.UntypedStorage]] = []
        self._known: dict[int, tuple[str, int]] = {}
        self._parameters = list(parameters)
        self._hooks: list[Any] = []
        self._saving: Any = None

    def __enter__(self) -> "MemoryTracker":
        self._saving = torch.autograd.graph.saved_tensors_hooks(self.save, lambda tensor: tensor)
        self._saving.__enter__()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._gradient)
            for p in self._parameters
            if p.requires_grad
        ]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()
        self._saving.__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.created(func, args, out)
        return out

    def created(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Count the results of an operator, and the memory that it needed in addition."""
        map_tensors(out, self._created)
        if func is _LOSS:
            needed = workspace_of(*args)
            self.current["workspace"] += needed
            self._see_peak()
            self.current["workspace"] -= needed

    def _created(self, result: Any) -> None:
        if isinstance(result, Tensor):
            self.assign(result, "workspace", again=False)

    def assign(self, tensor: Tensor, category: str, *, again: bool = True) -> None:
        """Count a tensor's storages under a category.

        Args:
            tensor: the tensor; a subclass counts by the tensors inside it.
            category: one of CATEGORIES.
            again: whether to change the category of a storage that has one already.
        """
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            key = id(storage)  # torch keeps the object while the memory exists
            old = self._known.get(key)
            if old is not None and not again:
                continue
            num_bytes = storage.nbytes()
            if old is None:
                self.see_resized()
                weakref.finalize(storage, self._free, key)
            else:
                self.current[old[0]] -= old[1]
            self._known[key] = category, num_bytes
            self.current[category] += num_bytes
        self._see_peak()

    def _see_peak(self) -> None:
        if self.total > self.peak_total:
            self.peak = dict(self.current)

    @property
    def total(self) -> int:
        """The live bytes."""
        return sum(self.current.values())

    @property
    def peak_total(self) -> int:
        """The live bytes at the peak."""
        return sum(self.peak.values())

    def see_resized(self) -> None:
        """Count again the storages that may have been resized."""
        known = self._known
        for group in self.resizable:
            storage = group[0]
            first = known.get(id(storage))
            if first is None or first[1] == storage.nbytes():
                continue
            for storage in group:
                if id(storage) in known:
                    category, num_bytes = known[id(storage)]
                    known[id(storage)] = category, storage.nbytes()
                    self.current[category] += storage.nbytes() - num_bytes
        self._see_peak()

    def _free(self, key: int) -> None:
        category, num_bytes = self._known.pop(key)
        self.current[category] -= num_bytes

    def save(self, tensor: Tensor) -> Tensor:
        """Count a tensor as saved for backward, as a hook of autograd, and return it."""
        for part in plain_parts(tensor):
            known = self._known.get(id(part.untyped_storage()))
            if known is None or known[0] == "workspace":
                self.assign(part, "saved activations")
        return tensor

    def _gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.assign(parameter.grad, "gradients")


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold a tensor's memory; a wrapper subclass declares several."""
    if type(tensor) in (Tensor, nn.Parameter, FakeTensor):
        return [tensor]
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [leaf for name in names for leaf in plain_parts(getattr(tensor, name))]
    return [tensor] if isinstance(tensor, nn.Parameter) else []
