"""The reduce-scatter of FSDP2 in FP8.

FSDP2 hands a custom reduce-scatter one buffer: for each rank the shards of all gradients of a
module, one behind the other. `Float8ReduceScatter` makes a message of each such part
(`torch_fp8.ops.messages`): gradients of FP8 weights as 8-bit codes in groups of 32, which begin
anew with every parameter, all others (norms, biases, embeddings) as BF16. An all-to-all brings each
rank the N messages of its shards, and it adds them in float32: every gradient is rounded once,
before the sum. (A `reduce_dtype` is what the sum is written in, not the message.) An Inf or NaN of
one rank makes the sum of its group NaN.

With two mesh dimensions (HSDP) that is the exchange among the ranks that shard, and
`torch_fp8.distributed.fsdp.replicas` that among replicas.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fp8.distributed.averaging import (
    WIRE_DTYPES,
    Run,
    by_form,
    copy_back,
    joined,
    target_of,
)
from torch_fp8.distributed.collectives import all_to_all
from torch_fp8.distributed.fsdp.grad_structure import GroupStructures, factor_of, layout_of
from torch_fp8.distributed.links import Exchanges
from torch_fp8.ops.messages import pack, unpack_sum
from torch_fp8.quantization.formats import GROUP_SIZE


class Float8ReduceScatter:
    """FSDP2's reduce-scatter for the gradients of one parameter group, in FP8.

    It has the two methods of torch's ``ReduceScatter``.

    Attributes:
        stock: the reduce-scatter that the group had before.

    Args:
        param_group: FSDP's.
        name: qualified name of the module that it belongs to.
        exchanges: whether gradients are scattered in 8 bits; else as without us.
    """

    def __init__(self, param_group: Any, name: str, exchanges: Exchanges) -> None:
        self._exchanges, self.stock = exchanges, param_group._reduce_scatter_comm
        self.structures = GroupStructures(param_group, name)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Write part r of the sum over ranks into rank r's output.

        Args:
            output_tensor: (E,) float32, bfloat16 or float16.
            input_tensor: (N * E,), likewise.
            group: a process group of N ranks.
            op: SUM, AVG or PREMUL_SUM.
            async_op: return at once, with something to ``wait`` for.
        """
        if not self._exchanges["scatter"]:
            return self.stock(output_tensor, input_tensor, group, op, async_op)
        factor = factor_of(op, dist.get_world_size(group))
        runs = self.structures.of(output_tensor.numel())
        # (N * E,) -> (N, E) -> (N, B) bytes: row r goes to rank r
        messages = pack_parts(input_tensor.view(-1, output_tensor.numel()), runs)
        received = torch.empty_like(messages)  # row r comes from rank r, each of this rank's shards
        work = all_to_all(received, messages, group, async_op)
        pending = _Pending(work, received, runs, output_tensor, factor)
        if async_op:
            return pending
        pending.finish()
        return None


class _Pending:
    """A work handle: messages on their way, and where their sum belongs."""

    def __init__(
        self, work: Any, messages: Tensor, runs: list[Run], output: Tensor, factor: float
    ) -> None:
        self._work, self._messages, self._runs = work, messages, runs
        self._output, self._factor = output, factor

    def wait(self, *args: Any) -> bool:
        """Block until the sum is in the output."""
        self._work.wait(*args)
        self.finish()
        return True

    def finish(self) -> None:
        unpack_parts(self._messages, self._runs, self._output, self._factor)


def pack_parts(parts: Tensor, runs: list[Run]) -> Tensor:
    """Encode each of (N, E) parts as a message: (N, B) uint8."""
    if parts.dtype == torch.float16:
        parts = parts.float()
    grouped, plain = by_form(runs)
    values = joined(parts, grouped, GROUP_SIZE)  # (N, elements in groups)
    if missing := -values.shape[1] % GROUP_SIZE:
        values = F.pad(values, (0, missing))
    return pack(values, joined(parts, plain, 1) if plain else None)


def unpack_parts(messages: Tensor, runs: list[Run], output: Tensor, factor: float) -> None:
    """Write `factor` times the sum of the messages (N, B) into `output` (E,)."""
    layout, (grouped, plain) = layout_of(runs), by_form(runs)
    values = target_of(output, grouped, layout.num_values, WIRE_DTYPES)
    others = target_of(output, plain, layout.num_plain, WIRE_DTYPES)
    unpack_sum(messages, layout, values[0], others[0] if layout.num_plain else None, factor)
    copy_back(output, grouped, *values, GROUP_SIZE)
    copy_back(output, plain, *others, 1)
