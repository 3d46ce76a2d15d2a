"""Bytes per parameter: `memory_report` of what exists, and what a training run is about to need."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_CATEGORIES = ("weights", "gradients", "moments", "master", "scales")
_NUM_MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2}


@dataclass(frozen=True)
class MemoryReport:
    """Exact bytes of the tensors that exist, by category; a storage shared by several counts once.

    Attributes:
        num_params: parameters of the model, tied ones once; of a sharded one, this rank's part.
        weights: the parameters' storages.
        gradients: the storages of ``p.grad``.
        moments: optimizer state of a parameter's shape (exp_avg, momentum buffers, ...).
        master: master weights and residuals in the optimizer.
        scales: scaling factors and amax histories.
    """

    num_params: int
    weights: int
    gradients: int
    moments: int
    master: int
    scales: int

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(getattr(self, name) for name in _CATEGORIES)

    @property
    def bytes_per_param(self) -> float:
        """`total` over `num_params`."""
        return self.total / max(self.num_params, 1)

    def __str__(self) -> str:
        parts = [
            f"{name} {getattr(self, name) / max(self.num_params, 1):.2f}"
            for name in _CATEGORIES
            if getattr(self, name)
        ]
        return f"{self.bytes_per_param:.2f} bytes per parameter ({', '.join(parts)})"


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Count the bytes of the tensors that exist now.

    Args:
        model: its parameters, gradients and scaling state are counted.
        optimizer: its states are counted as moments, except 0-d counters.
    """
    parameters = list(model.parameters())
    states = [] if optimizer is None else list(optimizer.state.values())
    moments = [t for state in states for t in _tensors(state) if t.ndim > 0]
    scales = [b for n, b in model.named_buffers() if n.rpartition(".")[2].startswith("fp8_")]
    return MemoryReport(
        num_params=sum(_local(p).numel() for p in parameters),
        weights=_num_bytes(parameters),
        gradients=_num_bytes([p.grad for p in parameters if p.grad is not None]),
        moments=_num_bytes(moments),
        master=0,
        scales=_num_bytes(scales),
    )


def expected_bytes_per_param(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> str:
    """What training will hold once gradients and optimizer states exist, in words.

    The states of Adam's family and of SGD with momentum are known from their class; another
    optimizer's are not guessed.
    """
    parameters = [_local(p) for p in model.parameters()]
    count = max(sum(p.numel() for p in parameters), 1)
    weights = _num_bytes(parameters)
    gradients = sum(_local(p).nbytes for p in model.parameters() if p.requires_grad)
    moments, unknown = 0, []
    for optimizer in optimizers:
        num = _num_moments(optimizer)
        if num is None:
            unknown.append(type(optimizer).__name__)
            continue
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        moments += num * sum(_local(p).nbytes for p in trained if p.requires_grad)
    text = (
        f"{(weights + gradients + moments) / count:.2f} bytes per parameter, before and after "
        f"(weights {weights / count:.2f}, gradients {gradients / count:.2f}, "
        f"moments {moments / count:.2f})"
    )
    return f"{text}; not counted: the states of {', '.join(unknown)}" if unknown else text


def _num_moments(optimizer: torch.optim.Optimizer) -> int | None:
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("torch.optim") and cls.__name__ in _NUM_MOMENTS:
            amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
            return _NUM_MOMENTS[cls.__name__] + amsgrad
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return None


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _tensors(state: dict[str, object]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def _num_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`; of the local shard for a DTensor."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = _local(tensor)
        if local.device.type == "meta":
            seen[id(tensor)] = local.numel() * local.element_size()
        else:
            storage = local.untyped_storage()
            seen[storage.data_ptr() or id(tensor)] = storage.nbytes()
    return sum(seen.values())
