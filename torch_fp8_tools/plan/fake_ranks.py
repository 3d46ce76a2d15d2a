"""A fake process group in which only this rank exists, and a counter for tensors without memory."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_fp8_tools.comm_counter import Recorder


class FakeRecorder(Recorder):
    """A counter of collectives that also counts those of tensors without memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        types = [t for t in types if not issubclass(t, FakeTensor)]
        return super().__torch_dispatch__(func, types, args, kwargs)


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
