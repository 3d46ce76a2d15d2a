"""A fake process group in which only this rank exists, and a counter of the bytes that it sends."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

_NO_DISPATCH = Tensor.__torch_dispatch__
_GATHERS, _SCATTERS = ("allgather", "allreduce"), ("reduce_scatter", "alltoall")


class SentBytes(TorchDispatchMode):
    """Counts what a rank sends in FSDP2's collectives, as rings send it, without memory too.

    Attributes:
        gathered, scattered: bytes in front of the products of weights, and of gradients.
        calls: the number of collectives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gathered = self.scattered = 0.0
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = (t for t in types if not issubclass(t, FakeTensor))
        if any(getattr(t, "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH for t in ours):
            return NotImplemented  # a DTensor's collectives arrive here again
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2].lstrip("_")
        if func.namespace == "c10d" and name.startswith((*_GATHERS, *_SCATTERS)):
            self.calls += 1
            ranks = dist.get_world_size()
            rounds = (2 if name.startswith("allreduce") else 1) * (ranks - 1) / ranks
            sent = rounds * max(map(_bytes_of, args))  # the gathered, or unscattered, buffer
            if name.startswith(_GATHERS):
                self.gathered += sent
            else:
                self.scattered += sent
        return result


def _bytes_of(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_bytes_of, argument)) if isinstance(argument, (list, tuple)) else 0


@contextlib.contextmanager
def fake_ranks(number: int) -> Iterator[DeviceMesh | None]:
    """Enter a process group of `number` ranks as rank 0; collectives move nothing.

    Yields:
        The mesh of all ranks; None for one rank, which needs no group.
    Raises:
        ValueError: this process already is in a process group.
    """
    if number == 1:
        yield None
        return
    if dist.is_initialized():
        raise ValueError(
            "this process is already in a torch.distributed process group, and planning for "
            "several GPUs needs its own: plan before init_process_group, or in another process"
        )
    dist.init_process_group("fake", rank=0, world_size=number)
    try:
        yield init_device_mesh("cpu", (number,))
    finally:
        dist.destroy_process_group()
