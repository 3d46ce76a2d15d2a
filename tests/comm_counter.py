"""`count_communication` counts the bytes that collectives send, by kind and dtype.

Every collective of ``torch.distributed`` is an operator, which a TorchDispatchMode sees, also those
that DDP's reducer and FSDP2 issue in backward. Each of N ranks sends:

| kind | bytes sent by a rank |
|---|---|
| all-reduce | 2 (N - 1) / N of the buffer |
| all-gather, reduce-scatter | (N - 1) / N of the gathered, the unscattered buffer |
| all-to-all | what of its buffer is for others: (N - 1) / N if the parts are equal |
| broadcast | on the source all of the buffer; else nothing |

Other collectives are not counted, nor those that a future's callback issues in a thread of the
backend.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.internals import map_tensors

_C10D = {
    "allreduce_": ("all-reduce", "tensors"),
    "allreduce_coalesced_": ("all-reduce", "tensors"),
    "allgather_": ("all-gather", "output_tensors"),
    "allgather_coalesced_": ("all-gather", "output_lists"),
    "_allgather_base_": ("all-gather", "output_tensor"),
    "allgather_into_tensor_coalesced_": ("all-gather", "outputs"),
    "reduce_scatter_": ("reduce-scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce-scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", "inputs"),
    "alltoall_": ("all-to-all", "input_tensors"),
    "alltoall_base_": ("all-to-all", "input"),
    "broadcast_": ("broadcast", "tensors"),
}
"""Operator -> kind, and the argument with the full buffer."""
_FUNCTIONAL = {
    f"{name}{suffix}": (kind, "inputs" if "coalesced" in suffix else "input")
    for name, kind, suffixes in (
        ("all_reduce", "all-reduce", ("", "_", "_coalesced", "_coalesced_")),
        ("all_gather_into_tensor", "all-gather", ("", "_out", "_coalesced")),
        ("reduce_scatter_tensor", "reduce-scatter", ("", "_out", "_coalesced")),
        ("all_to_all_single", "all-to-all", ("",)),
        ("broadcast", "broadcast", ("", "_")),
    )
    for suffix in suffixes
}
"""As `_C10D`; of a gather the argument has one rank's part."""
_COLLECTIVES = {
    "c10d": _C10D,
    "_c10d_functional": _FUNCTIONAL,
    "_c10d_functional_autograd": _FUNCTIONAL,
    "_dtensor": {"shard_dim_alltoall": ("all-to-all", "input")},
}
_NO_DISPATCH = Tensor.__torch_dispatch__
_TRACED = (FakeTensor, FunctionalTensor)


@dataclass(frozen=True)
class CommunicationRow:
    """The collectives of one kind, one dtype and one number of ranks.

    Attributes:
        kind: a kind of the table above.
        dtype: the dtype of the buffers; FP8 travels as ``torch.uint8``.
        ranks: the number of ranks in the process group, N.
        calls: the number of collectives.
        payload_bytes: the bytes of the full (gathered, unscattered) buffers, on whichever rank.
        bytes_sent: the bytes that this rank sends, by the table above.
    """

    kind: str
    dtype: torch.dtype
    ranks: int
    calls: int
    payload_bytes: int
    bytes_sent: float


class CommunicationCount:
    """The collectives of this rank that `count_communication` has counted."""

    def __init__(self, rows: Iterable[CommunicationRow] = ()) -> None:
        self._rows = {(row.kind, str(row.dtype), row.ranks): row for row in rows}
        self._lock = threading.Lock()  # autograd runs one thread per device

    @property
    def rows(self) -> list[CommunicationRow]:
        return [self._rows[key] for key in sorted(self._rows)]

    @property
    def calls(self) -> int:
        return sum(row.calls for row in self.rows)

    @property
    def payload_bytes(self) -> int:
        return sum(row.payload_bytes for row in self.rows)

    @property
    def bytes_sent(self) -> float:
        return sum(row.bytes_sent for row in self.rows)

    def of(self, kind: str | None = None, dtype: torch.dtype | None = None) -> "CommunicationCount":
        """Return a count with only the rows of this kind and dtype; None matches any."""
        rows = (r for r in self.rows if kind in (None, r.kind) and dtype in (None, r.dtype))
        return CommunicationCount(rows)

    def add(self, row: CommunicationRow) -> None:
        key = (row.kind, str(row.dtype), row.ranks)
        with self._lock:
            old = self._rows.get(key)
            if old is not None:
                counts = ("calls", "payload_bytes", "bytes_sent")
                row = replace(row, **{n: getattr(old, n) + getattr(row, n) for n in counts})
            self._rows[key] = row

    def __repr__(self) -> str:
        return "\n".join(map(str, self.rows))


@contextlib.contextmanager
def count_communication() -> Iterator[CommunicationCount]:
    """Count the collectives that this process issues in this context, including those in backward.

    While a context is open, every operator goes through Python, so don't measure times in it.
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
        name = func._schema.name.rpartition("::")[2]
        kind, buffer = _COLLECTIVES.get(func.namespace, {}).get(name, (None, ""))
        if kind is not None:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            given.update(kwargs or {})
            is_part = kind == "all-gather" and func.namespace != "c10d"
            self._record(kind, given[buffer], is_part, given)
        return result

    def _record(self, kind: str, buffer: Any, is_part: bool, given: Mapping[str, Any]) -> None:
        group = _group_of(given)
        ranks = group.size()
        sizes: dict[torch.dtype, int] = defaultdict(int)
        tensors: list[Tensor] = []
        map_tensors(buffer, tensors.append)
        for tensor in tensors:
            sizes[tensor.dtype] += tensor.nbytes
        for dtype, size in sizes.items():
            full = size * ranks if is_part else size
            sent = _bytes_sent(kind, full, ranks, group.rank(), given)
            self.count.add(CommunicationRow(kind, dtype, ranks, 1, full, sent))


class FakeRecorder(Recorder):
    """A counter of collectives that also counts those of tensors without memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        types = [t for t in types if not issubclass(t, FakeTensor)]
        return super().__torch_dispatch__(func, types, args, kwargs)


def _bytes_sent(kind: str, full: int, ranks: int, rank: int, given: Mapping[str, Any]) -> float:
    if ranks == 1:
        return 0
    if kind == "broadcast":
        return full if rank == given.get("root_rank", given.get("src")) else 0
    if kind == "all-to-all" and "input_tensors" in given:
        return full - int(given["input_tensors"][rank].nbytes)
    if kind == "all-to-all" and given.get("input_split_sizes"):
        splits = given["input_split_sizes"]
        return full - full * splits[rank] / max(sum(splits), 1)
    return (2 if kind == "all-reduce" else 1) * full * (ranks - 1) / ranks


def _group_of(given: Mapping[str, Any]) -> Any:
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
