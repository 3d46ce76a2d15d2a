"""The FP8 reduce-scatter of FSDP2.

FSDP2 passes a custom reduce-scatter one buffer. It contains one part for each rank, with the rank's
shards of all gradients of a module one after another. `Float8ReduceScatter` encodes each part as a
message (`torch_fp8.ops.messages`): gradients of FP8 weights as 8-bit codes in groups of 32, which
start anew with every parameter, and all others (norms, biases, embeddings) as BF16. An all-to-all
sends each rank the N messages for its shards, and it adds them in float32. So every gradient is
rounded once, before the sum. (`reduce_dtype` is the dtype of the result, not of the message.) An
Inf or NaN on one rank makes the sum of its group NaN.

With two mesh dimensions (HSDP) this exchange runs among the ranks that shard. FSDP2 then
all-reduces the result of its reduce-scatter over the ranks that hold the same shard in other
replicas. These are often on other nodes, where links are slowest. It calls
``dist.all_reduce`` with the process group of its mesh. `Float8Replicas` replaces this process group
and averages with two collectives of messages (`torch_fp8.distributed.averaging`). FSDP2 still
decides when it reduces, by what it divides, which stream it uses and what it accumulates before.
"""

import copy
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.distributed.averaging import (
    DTYPES,
    WIRE_DTYPES,
    Run,
    all_to_all,
    average_runs,
    by_form,
    copy_back,
    joined,
    runs_of,
    target_of,
)
from torch_fp8.distributed.fsdp.expert_gather import is_expert_weight
from torch_fp8.distributed.links import Exchanges
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.messages import Layout, pack_flat, unpack_sum
from torch_fp8.quantization.formats import GROUP_SIZE


class Float8ReduceScatter:
    """FSDP2's reduce-scatter for the gradients of one parameter group, in FP8.

    It has the two methods of torch's ``ReduceScatter``.

    Args:
        param_group: FSDP's parameter group.
        name: the qualified name of its module.
        exchanges: the choice between 8 bits and the stock collective.
    Attributes:
        stock: the group's original reduce-scatter.
    """

    def __init__(self, param_group: Any, name: str, exchanges: Exchanges) -> None:
        self.exchanges, self.stock = exchanges, param_group._reduce_scatter_comm
        self._param_group, self._name = param_group, name
        self._plain: dict[int, list[Run]] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any) -> None:
        """Write part r of the reduction over ranks into rank r's output.

        Args:
            output_tensor: (E,) float32, bfloat16 or float16.
            input_tensor: (N * E,) float32, bfloat16 or float16.
            group: the process group, of N ranks.
            op: the reduction, SUM, AVG or PREMUL_SUM.
        """
        if not self.exchanges["scatter"]:
            self.stock(output_tensor, input_tensor, group, op)
            return
        factor = factor_of(op, dist.get_world_size(group))
        runs = self.structure(output_tensor.numel())
        # (N * E,) -> (N, E) -> (N, B) bytes: row r goes to rank r
        messages = pack_parts(input_tensor.view(-1, output_tensor.numel()), runs)
        received = torch.empty_like(messages)  # (N, B): row r is rank r's message to us
        all_to_all(received, messages, group)
        unpack_parts(received, runs, output_tensor, factor)

    def structure(self, numel: int) -> list[Run]:
        """Return the structure of one rank's part of the group's buffers with `numel` elements."""
        params = [p for p in self._param_group.fsdp_params if p.sharded_param.requires_grad]
        sizes = [(param.padded_sharded_param_size.numel(), in_groups(param)) for param in params]
        if sum(size for size, _ in sizes) == numel:
            return structure_of(sizes)
        if numel not in self._plain:
            warnings.warn(
                f"some parameters of {self._name!r} got no gradient, and FSDP does not report "
                "which: the other gradients are reduced in BF16 this time. To reduce them in FP8, "
                "call set_reduce_scatter_unused_params(True) (torch 2.13 or later)",
                stacklevel=2,
            )
            self._plain[numel] = [Run(0, numel, False)]
        return self._plain[numel]


def pack_parts(parts: Tensor, runs: list[Run]) -> Tensor:
    """Encode each row of (N, E) parts as a message: (N, B) uint8."""
    if parts.dtype == torch.float16:
        parts = parts.float()
    grouped, plain = by_form(runs)
    values = joined(parts, grouped, GROUP_SIZE)  # (N, elements in groups)
    if missing := -values.shape[1] % GROUP_SIZE:
        values = F.pad(values, (0, missing))
    others = joined(parts, plain, 1).reshape(-1) if plain else None  # (N, P) -> (N P,)
    return pack_flat(values.reshape(-1), others, layout_of(runs), len(parts))


def unpack_parts(messages: Tensor, runs: list[Run], output: Tensor, factor: float) -> None:
    """Write `factor` times the sum of the messages (N, B) into `output` (E,)."""
    layout, (grouped, plain) = layout_of(runs), by_form(runs)
    values = target_of(output, grouped, layout.num_values, WIRE_DTYPES)
    others = target_of(output, plain, layout.num_plain, WIRE_DTYPES)
    unpack_sum(messages, layout, values[0], others[0] if layout.num_plain else None, factor)
    copy_back(output, grouped, *values, GROUP_SIZE)
    copy_back(output, plain, *others, 1)


def layout_of(runs: Sequence[Run]) -> Layout:
    """Return the layout of a message with these runs."""
    grouped, plain = by_form(runs)
    groups = sum(-(-(run.stop - run.start) // GROUP_SIZE) for run in grouped)
    return Layout(groups, sum(run.stop - run.start for run in plain))


def structure_of(sizes: Sequence[tuple[int, bool]]) -> list[Run]:
    """Return the runs of a part with shards of these (numel, whether in groups)."""
    starts = itertools.accumulate((numel for numel, _ in sizes), initial=0)
    return runs_of((start, *size) for start, size in zip(starts, sizes, strict=False))


def in_groups(param: Any) -> bool:
    """Return whether the gradient of one of FSDP's parameters travels in 8 bits."""
    info = param._module_info
    if is_expert_weight(info.module, info.param_name):
        return True
    return isinstance(info.module, Float8Layer) and info.param_name == "weight"


def factor_of(op: Any, world_size: int) -> float:
    """Return the factor by which a sum over `world_size` ranks becomes the reduction `op`."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(op.__getstate__()[1])
    raise ValueError(f"gradients can be reduced as a sum or an average, not with {op}")


class Float8Replicas:
    """A replacement for the process group in which FSDP2 all-reduces a parameter group's gradients.

    Args:
        group: the process group of the ranks that hold the same shards.
        scatter: the parameter group's reduce-scatter, with the structure of its buffers and the
            choice between 8 bits and the stock collective.
    """

    def __init__(self, group: Any, scatter: Float8ReduceScatter) -> None:
        self.group, self._scatter = group, scatter

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
        if buffer.dtype not in DTYPES or not self._scatter.exchanges["replicas"]:
            return self.group.allreduce(tensors, options)
        factor = factor_of(options.reduceOp, self.size())
        for _ in average_runs(buffer, self._scatter.structure(buffer.numel()), self.group, factor):
            pass
        return None


def connect_replicas(param_group: Any) -> bool:
    """Average the gradients of a parameter group with a `Float8ReduceScatter` among replicas in
    FP8; return False if it has no replicas.
    """
    group = getattr(param_group.mesh_info, "replicate_process_group", None)
    if group is None or group.size() == 1:
        return False
    # Copy the record: parameters share it, and build DTensors from the mesh in it.
    param_group.mesh_info = copy.copy(param_group.mesh_info)
    replicas = Float8Replicas(group, param_group._reduce_scatter_comm)
    param_group.mesh_info.replicate_process_group = replicas
    return True


def disconnect_replicas(param_group: Any) -> None:
    """Restore the stock all-reduce."""
    group = getattr(param_group.mesh_info, "replicate_process_group", None)
    if isinstance(group, Float8Replicas):
        param_group.mesh_info.replicate_process_group = group.group
