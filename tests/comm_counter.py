"""`count_communication` counts the bytes that collectives send, by kind and dtype.

Every collective of ``torch.distributed`` is an operator (``c10d::*``; ``_c10d_functional::*`` for
the functional ones that DTensor and torch.compile use). A TorchDispatchMode sees each of them,
including those that DDP's reducer and FSDP2 issue in backward, because autograd passes the mode on
to its threads. Each of N ranks sends:

| kind | bytes sent by a rank |
|---|---|
| all-reduce | 2 (N - 1) / N of the buffer |
| all-gather, reduce-scatter | (N - 1) / N of the gathered, the unscattered buffer |
| all-to-all | what of its buffer is for others: (N - 1) / N if the parts are equal |
| broadcast, scatter | on the source all of the buffer, all parts but its own; else nothing |
| reduce, gather | its own buffer; on the destination nothing |
| send, recv | the buffer; nothing |

Ring algorithms send these bytes. They are the minimum for every kind except the all-reduce of small
buffers; a backend may send more. Barriers move no data and are not counted. The counter doesn't see
collectives of torch's symmetric memory, nor those that a future's callback issues in a thread of
the backend, as PowerSGD's hook does on gloo.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fp8.quantization.wording import aligned
from torch_fp8.tensor.base import map_tensors


class _Collective(NamedTuple):
    """The kind of an operator, and the argument that holds its data.

    Attributes:
        kind: a kind of the table above.
        buffer: the name of the argument.
        part: whether the argument is one rank's part of the full buffer.
    """

    kind: str
    buffer: str
    part: bool = False


_C10D = {
    "allreduce_": _Collective("all-reduce", "tensors"),
    "allreduce_coalesced_": _Collective("all-reduce", "tensors"),
    "allgather_": _Collective("all-gather", "output_tensors"),
    "allgather_coalesced_": _Collective("all-gather", "output_lists"),
    "_allgather_base_": _Collective("all-gather", "output_tensor"),
    "allgather_into_tensor_coalesced_": _Collective("all-gather", "outputs"),
    "reduce_scatter_": _Collective("reduce-scatter", "input_tensors"),
    "_reduce_scatter_base_": _Collective("reduce-scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": _Collective("reduce-scatter", "inputs"),
    "alltoall_": _Collective("all-to-all", "input_tensors"),
    "alltoall_base_": _Collective("all-to-all", "input"),
    "broadcast_": _Collective("broadcast", "tensors"),
    "scatter_": _Collective("scatter", "output_tensors", part=True),
    "reduce_": _Collective("reduce", "tensors"),
    "gather_": _Collective("gather", "input_tensors", part=True),
    "send": _Collective("send", "tensors"),
    "recv_": _Collective("recv", "tensors"),
    "recv_any_source_": _Collective("recv", "tensors"),
}
_FUNCTIONAL = {
    "all_reduce": _Collective("all-reduce", "input"),
    "all_reduce_": _Collective("all-reduce", "input"),
    "all_reduce_coalesced": _Collective("all-reduce", "inputs"),
    "all_reduce_coalesced_": _Collective("all-reduce", "inputs"),
    "all_gather_into_tensor": _Collective("all-gather", "input", part=True),
    "all_gather_into_tensor_out": _Collective("all-gather", "input", part=True),
    "all_gather_into_tensor_coalesced": _Collective("all-gather", "inputs", part=True),
    "reduce_scatter_tensor": _Collective("reduce-scatter", "input"),
    "reduce_scatter_tensor_out": _Collective("reduce-scatter", "input"),
    "reduce_scatter_tensor_coalesced": _Collective("reduce-scatter", "inputs"),
    "all_to_all_single": _Collective("all-to-all", "input"),
    "broadcast": _Collective("broadcast", "input"),
    "broadcast_": _Collective("broadcast", "input"),
    "isend": _Collective("send", "tensor"),
    "irecv": _Collective("recv", "tensor"),
}
_COLLECTIVES: dict[str, dict[str, _Collective]] = {
    "c10d": _C10D,
    "_c10d_functional": _FUNCTIONAL,
    "_c10d_functional_autograd": _FUNCTIONAL,
    "_dtensor": {"shard_dim_alltoall": _Collective("all-to-all", "input")},
}
_NO_DISPATCH = Tensor.__torch_dispatch__
_TRACED = (FakeTensor, FunctionalTensor)
_BATCH = "batch_p2p_ops"  # a _c10d_functional operator that both sends and receives


@dataclass(frozen=True)
class CommunicationRow:
    """The collectives of one kind, one dtype and one number of ranks.

    Attributes:
        kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"``,
            ``"broadcast"``, ``"scatter"``, ``"reduce"``, ``"gather"``, ``"send"`` or ``"recv"``.
        dtype: the dtype of the buffers; FP8 travels as ``torch.uint8``.
        ranks: the number of ranks in the process group, N.
        calls: the number of collectives.
        payload_bytes: the bytes of the full (gathered, unscattered) buffers, on whichever rank.
        bytes_sent: the bytes that this rank sends, by the table above; not a whole number if N does
            not divide the buffer.
    """

    kind: str
    dtype: torch.dtype
    ranks: int
    calls: int
    payload_bytes: int
    bytes_sent: float


class CommunicationCount:
    """The collectives of this rank that `count_communication` has counted; prints as a table.

    Attributes:
        rows: a `CommunicationRow` for each kind, dtype and number of ranks, sorted in this order.
        calls: the number of collectives in all rows.
        payload_bytes: the bytes of the full buffers in all rows.
        bytes_sent: the bytes that this rank sent in all rows.
    """

    def __init__(self, rows: Iterable[CommunicationRow] = ()) -> None:
        self._rows = {(row.kind, str(row.dtype), row.ranks): row for row in rows}
        self._lock = threading.Lock()  # autograd runs one thread per device

    @property
    def rows(self) -> list[CommunicationRow]:
        return [self._rows[key] for key in sorted(self._rows)]

    @property
    def calls(self) -> int:
        """The number of collectives."""
        return sum(row.calls for row in self._rows.values())

    @property
    def payload_bytes(self) -> int:
        """The bytes of the full buffers."""
        return sum(row.payload_bytes for row in self._rows.values())

    @property
    def bytes_sent(self) -> float:
        """The bytes that this rank sent."""
        return sum(row.bytes_sent for row in self._rows.values())

    def of(
        self,
        kind: str | None = None,
        dtype: torch.dtype | None = None,
        ranks: int | None = None,
    ) -> "CommunicationCount":
        """Return a count with only the rows of this kind, dtype and ranks; None matches any."""
        return CommunicationCount(
            row
            for row in self.rows
            if kind in (None, row.kind)
            and dtype in (None, row.dtype)
            and ranks in (None, row.ranks)
        )

    def _add(self, row: CommunicationRow) -> None:
        key = (row.kind, str(row.dtype), row.ranks)
        with self._lock:
            old = self._rows.get(key)
            if old is not None:
                counts = ("calls", "payload_bytes", "bytes_sent")
                row = replace(row, **{n: getattr(old, n) + getattr(row, n) for n in counts})
            self._rows[key] = row

    def __str__(self) -> str:
        head = ("kind", "dtype", "ranks", "calls", "payload bytes", "bytes sent")
        lines = [head]
        for row in self.rows:
            dtype = str(row.dtype).removeprefix("torch.")
            lines.append((row.kind, dtype, str(row.ranks), *_numbers(row)))
        lines.append(("total", "", "", *_numbers(self)))
        return aligned(lines, left=2)


def _numbers(count: CommunicationRow | CommunicationCount) -> tuple[str, str, str]:
    return f"{count.calls:,}", f"{count.payload_bytes:,}", f"{count.bytes_sent:,.0f}"


@contextlib.contextmanager
def count_communication() -> Iterator[CommunicationCount]:
    """Count the collectives that this process issues in this context, including those in backward.

    Counting does not change a step's results. Contexts may be nested, and each of them counts.
    While a context is open, every operator goes through Python, so don't measure times in it. A
    collective is counted when it is issued, by the bytes that it sends.

    ::

        with count_communication() as count:
            model(x).sum().backward()
        print(count, count.of("all-gather", torch.uint8).bytes_sent)
    """
    count = CommunicationCount()
    with Recorder(count):
        yield count


class Recorder(TorchDispatchMode):
    """A dispatch mode that records every collective in a count."""

    def __init__(self, count: CommunicationCount) -> None:
        super().__init__()
        self.count = count

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise torch.compile would run eagerly in this context.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, _TRACED) for t in types):
            return func(*args, **(kwargs or {}))  # no data moves: DTensor only computes shapes
        if any(getattr(t, "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH for t in types):
            # A DTensor turns the operator into collectives, which arrive here again.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        known = _COLLECTIVES.get(func.namespace)
        if known is not None:
            name = func._schema.name.rpartition("::")[2]
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            given.update(kwargs or {})
            if name == _BATCH:
                for operation, tensor in zip(given["op_list"], given["tensors"], strict=True):
                    self._record(_FUNCTIONAL[operation], {**given, "tensor": tensor})
            elif name in known:
                self._record(known[name], given)
        return result

    def _record(self, collective: _Collective, given: Mapping[str, Any]) -> None:
        group = _group_of(given)
        ranks, rank = group.size(), group.rank()
        sizes: dict[torch.dtype, int] = defaultdict(int)
        tensors: list[Tensor] = []
        map_tensors(given[collective.buffer], tensors.append)
        for tensor in tensors:
            sizes[tensor.dtype] += tensor.numel() * tensor.element_size()
        for dtype, size in sizes.items():
            full = size * ranks if collective.part else size
            sent = _bytes_sent(collective, full, ranks, rank, given)
            self.count._add(CommunicationRow(collective.kind, dtype, ranks, 1, full, sent))


class FakeRecorder(Recorder):
    """A counter of collectives that also counts those of tensors without memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        types = [t for t in types if not issubclass(t, FakeTensor)]
        return super().__torch_dispatch__(func, types, args, kwargs)


def _bytes_sent(
    collective: _Collective, full: int, ranks: int, rank: int, given: Mapping[str, Any]
) -> float:
    kind = collective.kind
    if kind == "send":
        return full
    if kind == "recv" or ranks == 1:
        return 0
    if kind == "all-to-all":
        return full - _own_part(full, ranks, rank, given)
    if kind in ("broadcast", "scatter", "reduce", "gather"):
        at_root = rank == given.get("root_rank", given.get("src"))
        if kind == "broadcast":
            return full if at_root else 0
        if kind == "scatter":
            return full * (ranks - 1) / ranks if at_root else 0
        own = full / ranks if kind == "gather" else full
        return 0 if at_root else own
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * full * (ranks - 1) / ranks


def _own_part(full: int, ranks: int, rank: int, given: Mapping[str, Any]) -> float:
    """Return the bytes of an all-to-all's input that stay on this rank."""
    parts = given.get("input_tensors")
    if parts is not None:
        return int(parts[rank].numel() * parts[rank].element_size())
    splits = given.get("input_split_sizes")
    return full * splits[rank] / max(sum(splits), 1) if splits else full / ranks


def _group_of(given: Mapping[str, Any]) -> Any:
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
