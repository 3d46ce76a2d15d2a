"""The FP8 exchange of gradients among FSDP2's replicas (HSDP).

With two mesh dimensions FSDP2 all-reduces the result of its reduce-scatter over the ranks that hold
the same shard in other replicas. These are often on other nodes, where links are slowest. It calls
``dist.all_reduce`` with the process group of its mesh. `Float8Replicas` replaces this process group
and averages with two collectives of messages (`torch_fp8.distributed.averaging`). FSDP2 still
decides when it reduces, by what it divides, which stream it uses and what it accumulates before.
"""

import copy
from typing import Any

from torch_fp8.distributed.averaging import DTYPES, average_runs
from torch_fp8.distributed.fsdp.reduce_scatter import GroupStructures, factor_of
from torch_fp8.distributed.links import Exchanges


class Float8Replicas:
    """A replacement for the process group in which FSDP2 all-reduces a parameter group's gradients.

    Args:
        group: the process group of the ranks that hold the same shards.
        structures: the structures of the parameter group's buffers.
        exchanges: the choice whether gradients are averaged in 8 bits or by the stock collective.
    """

    def __init__(self, group: Any, structures: GroupStructures, exchanges: Exchanges) -> None:
        self.group = group
        self._structures, self._exchanges = structures, exchanges

    def size(self) -> int:
        """Return the number of replicas."""
        return int(self.group.size())

    def rank(self) -> int:
        """Return the index of this rank's replica."""
        return int(self.group.rank())

    def allreduce(self, tensors: list[Any], options: Any) -> Any:
        """Replace a buffer by its sum or average over the replicas.

        Args:
            tensors: a list with one buffer, (E,).
            options: torch's ``AllreduceOptions``.
        Returns:
            None, because the current stream waits for the result; a ``Work`` if the stock
            collective reduces, as it does for dtypes without an 8-bit form.
        """
        (buffer,) = tensors
        if buffer.dtype not in DTYPES or not self._exchanges["replicas"]:
            return self.group.allreduce(tensors, options)
        factor = factor_of(options.reduceOp, self.size())
        runs = self._structures.of(buffer.numel())
        for _ in average_runs(buffer, runs, self.group, factor):
            pass
        return None


def connect_replicas(param_group: Any, structures: GroupStructures, exchanges: Exchanges) -> bool:
    """Average a parameter group's gradients among replicas in FP8; False if it has no replicas."""
    group = getattr(param_group.mesh_info, "replicate_process_group", None)
    if group is None or group.size() == 1:
        return False
    # Copy the record: parameters share it, and build DTensors from the mesh in it.
    param_group.mesh_info = copy.copy(param_group.mesh_info)
    param_group.mesh_info.replicate_process_group = Float8Replicas(group, structures, exchanges)
    return True


def disconnect_replicas(param_group: Any) -> None:
    """Restore the stock all-reduce."""
    group = getattr(param_group.mesh_info, "replicate_process_group", None)
    if isinstance(group, Float8Replicas):
        param_group.mesh_info.replicate_process_group = group.group
