"""Count the launches of a step, and the bytes that its kernels move, without a card.

Our operators run their Triton kernels in Triton's interpreter, on CPU tensors. Every executed load
and store is counted, without masked elements, for the tensor whose memory it touches. So
the counts show a kernel that reads twice. torch's own operators are launches
too, one each, unless they create a view or only memory. A GEMM is padded and laid out as on a card;
its result is zeros.

Import this before anything of ``torch_fp8``: the interpreter is chosen when Triton is imported, and
the implementations for CUDA are collected when they are registered. The interpreter rounds some FP8
formats wrongly, which does not matter for addresses.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCH_FP8_REPLAY"] = "0"  # a launch that is replayed passes by what counts it

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from triton.runtime import interpreter

from benchmarks.evidence.interpreter import mend

mend()


def _cuda_implementations() -> dict[str, Callable]:
    """Map each operator of torch_fp8 to its implementation for CUDA."""
    assert "torch_fp8" not in sys.modules, "import benchmarks.evidence.launches first"
    found: dict[str, Callable] = {}
    register = torch.library.Library.impl

    def noting(self, name, function, dispatch_key="", **options):
        if dispatch_key == "CUDA":
            found[str(name)] = function
        return register(self, name, function, dispatch_key, **options)

    with mock.patch.object(torch.library.Library, "impl", noting):
        package = importlib.import_module("torch_fp8")
        for name in package.__all__:  # which imports what registers operators
            getattr(package, name)
    return found


_CUDA = _cuda_implementations()

IN_L2 = 64 * 1024
"""The bytes of a tensor that programs may read again without memory traffic: a few kB of amaxes
stay in an L2 cache of 50 MB.
"""

AT_ONCE = 132
"""Consecutive programs assumed to run together, one on each multiprocessor of an H200: what
several of them read, or one of them twice, comes from memory once and then from the L2 cache."""

_FILLS = ("new_zeros", "new_full", "zeros_like", "full_like")
_ONLY_MEMORY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")


@dataclass
class Traffic:
    """Bytes of one tensor that one launch moved.

    Attributes:
        read, written: bytes of memory; bytes that stay in L2 count once (`IN_L2`, `AT_ONCE`).
        requested: bytes that all programs request.
    """

    read: int = 0
    written: int = 0
    requested: int = 0


@dataclass
class Launch:
    """A kernel, a GEMM, or an operator of torch.

    Attributes:
        name: its name.
        kind: ``kernel``, ``gemm`` or ``torch``.
        tensors: argument -> traffic. Arguments with one memory count as the first.
        sources: names of the tensors (see `count_launches`) that it reads, or from which the
            tensors that it reads were computed.
        within: our operator that contains it, or empty.
    """

    name: str
    kind: str
    tensors: dict[str, Traffic] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    within: str = ""

    @property
    def moved(self) -> int:
        """The bytes read and written."""
        return sum(t.read + t.written for t in self.tensors.values())

    @property
    def requested(self) -> int:
        """The bytes that programs requested, including those from a cache."""
        return sum(t.requested for t in self.tensors.values())


def count_launches(
    function: Callable[[], object], **tensors: Tensor | Sequence[Tensor]
) -> list[Launch]:
    """Return the launches of `function`, in order.

    Args:
        function: forward and backward on CPU tensors.
        tensors: name -> a tensor or several; a launch that reads one of them, or what such a launch
            wrote, is put down to that name. Kernels know memory as an argument, or as one of these.
    """
    with recorded() as recording:
        for name, value in tensors.items():
            recording.name(name, value)
        function()
    return recording.launches


class Recording:
    """The launches, with the tensors that they serve; `name` names tensors created meanwhile."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.names = _Names()

    def name(self, name: str, value: Tensor | Sequence[Tensor]) -> None:
        """Attribute launches that read one of these tensors, or what such a launch wrote, to
        `name`.
        """
        self.names.given |= {_address(t): name for t in tree_iter(value)}
        self.names.memory |= {_address(t): t for t in tree_iter(value) if t.numel()}

    def ignore(self, value: Sequence[Tensor]) -> None:
        """Ignore tensors that several others are written to, such as a history."""
        self.names.ignored |= {_address(t) for t in tree_iter(value)}


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Record the launches within, as `count_launches` does."""
    recording = Recording()
    launches, names = recording.launches, recording.names
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        _interpreted(launches, names),
        _as_on_a_card(launches, names),
        _Operators(launches, names),
    ):
        yield recording


class _Names:
    """The owners of memory: a tensor with a name, or one computed from such."""

    def __init__(self) -> None:
        self.given: dict[int, str] = {}
        self.memory: dict[int, Tensor] = {}
        self.made: dict[int, tuple[str, ...]] = {}
        self.ignored: set[int] = set()

    def attribute(self, read: list[int], written: list[int]) -> tuple[str, ...]:
        """Return the sources of a launch, which own its results from now on."""
        sources = [self.given[a] for a in read if a in self.given]
        if not sources:
            sources = [name for a in read for name in self.made.get(a, ())]
        unique = tuple(dict.fromkeys(sources))
        self.made |= dict.fromkeys((a for a in written if a not in self.ignored), unique)
        return unique


class _Operators(TorchDispatchMode):
    """A dispatch mode that routes our operators to their kernels and counts torch's."""

    def __init__(self, launches: list[Launch], names: _Names) -> None:
        super().__init__()
        self.launches, self.names = launches, names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "torch_fp8":
            first = len(self.launches)
            try:
                with self:  # what it allocates and what it leaves to torch
                    return _CUDA[name](*args, **(kwargs or {}))
            finally:
                own = self.launches[first:]
                sources = tuple(dict.fromkeys(n for launch in own for n in launch.sources))
                for launch in own:
                    launch.within = launch.within or name
                    launch.sources = launch.sources or sources  # what is filled was made of nothing
        made = func(*args, **(kwargs or {}))
        if not _is_free(func, name, args, kwargs or {}, made):
            launch = Launch(func._schema.name, "torch")
            given = () if name in _FILLS else (args, kwargs)
            read = [t for t in tree_iter(given) if isinstance(t, Tensor)]
            written = [t for t in tree_iter(made) if isinstance(t, Tensor)]
            for i, tensor in enumerate(read):
                size = tensor.numel() * tensor.element_size()
                launch.tensors[f"input {i}"] = Traffic(read=size, requested=size)
            for i, tensor in enumerate(written):
                size = tensor.numel() * tensor.element_size()
                launch.tensors[f"output {i}"] = Traffic(written=size, requested=size)
            addresses = [_address(t) for t in read], [_address(t) for t in written]
            launch.sources = self.names.attribute(*addresses)
            self.launches.append(launch)
        elif name in _ONLY_MEMORY and name != "detach":
            self.names.made.pop(_address(made), None)  # of another tensor that was there before
        return made


def _is_free(func, name, args, kwargs, made) -> bool:
    """Return whether nothing runs on the device: views, allocations, and empty tensors."""
    if name in _ONLY_MEMORY or func.is_view or name == "set_":
        return True
    results = [t for t in tree_iter(made) if isinstance(t, Tensor)]
    inputs = {_address(t) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    alias = all(_address(t) in inputs for t in results)
    return (bool(results) and alias and not writes) or not any(t.numel() for t in results)


def _address(tensor: Tensor) -> int:
    # Bypasses a Parameter that counts accesses to its memory: nothing is written here.
    return Tensor.untyped_storage(tensor).data_ptr()


@contextlib.contextmanager
def _as_on_a_card(launches: list[Launch], names: _Names) -> Iterator[None]:
    """Replace what asks for a tensor's device: GEMMs, padded and laid out and then one launch; the
    amax.
    """
    gemm = sys.modules["torch_fp8.ops.scaled_mm"]

    def operator(a, b, out_dtype, fast_accum, bias=None):
        launches.append(Launch("scaled_mm", "gemm"))
        columns = b.operand.qdata.shape[0]
        with _disable_current_modes():
            output = torch.zeros(a.qdata.shape[0], columns, dtype=out_dtype)
        names.made.pop(_address(output), None)
        return output

    def on_a_card(a, b, out_dtype, contracted=None, *, bias=None, fast_accum=False, emulate=False):
        bias = None if bias is None else gemm.cast(bias, out_dtype)
        contracted = contracted or min(a.qdata.shape[1], b.qdata.shape[1])
        return gemm.multiply_laid_out(a, gemm.lay_out(b, contracted), out_dtype, fast_accum, bias)

    def amax(x):
        return torch.linalg.vector_norm(x.detach(), ord=float("inf"), dtype=torch.float32)

    users = [m for name, m in sys.modules.items() if name.startswith("torch_fp8")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(gemm, "_product", operator))
        for name, other in (("scaled_matmul", on_a_card), ("tensor_amax", amax)):
            for module in users:
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, other))
        yield


class _Access(NamedTuple):
    """The elements that one program touched: addresses and size, and which programs ran with it;
    and the first and the last address.
    """

    pointers: np.ndarray
    itemsize: int
    is_write: bool
    window: int
    first: int
    last: int

    def within(self, address: int, size: int) -> np.ndarray:
        """Return those of `size` bytes from an address on: all, most often, or none."""
        end = address + size
        if self.last < address or self.first >= end:
            return self.pointers[:0]
        if address <= self.first and self.last < end:
            return self.pointers
        return self.pointers[(self.pointers >= address) & (self.pointers < end)]


@contextlib.contextmanager
def _interpreted(launches: list[Launch], names: _Names) -> Iterator[None]:
    """Run kernels in the interpreter, each a launch with its traffic."""
    accesses: list[_Access] = []
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, rmw = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.create_atomic_rmw,
    )
    run = executor.__call__

    def note(at, ptrs, mask, is_write):
        size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        x, y, z = at.grid_idx
        program = x + at.grid_dim[0] * (y + at.grid_dim[1] * z)
        inside = ptrs.data[mask.data.astype(bool)].ravel()
        ends = (int(inside.min()), int(inside.max())) if inside.size else (0, -1)
        accesses.append(_Access(inside, size, is_write, program // AT_ONCE, *ends))

    def noted_load(self, ptrs, mask, *rest):
        note(self, ptrs, mask, False)
        return load(self, ptrs, mask, *rest)

    def noted_store(self, ptrs, value, mask, *rest):
        note(self, ptrs, mask, True)
        return store(self, ptrs, value, mask, *rest)

    def noted_rmw(self, op, ptr, value, mask, *rest):
        note(self, ptr, mask, True)
        return rmw(self, op, ptr, value, mask, *rest)

    def noted_run(self, *args, **kwargs):
        accesses.clear()
        with _disable_current_modes():
            run(self, *args, **kwargs)
        launches.append(_launch(self, args, accesses, names))

    with (
        mock.patch.object(builder, "create_masked_load", noted_load),
        mock.patch.object(builder, "create_masked_store", noted_store),
        mock.patch.object(builder, "create_atomic_rmw", noted_rmw),
        mock.patch.object(executor, "__call__", noted_run),
    ):
        yield


def _distinct(
    pointers: list[np.ndarray], written: list[np.ndarray], address: int, size: int
) -> int:
    """Count the distinct addresses of a tensor of `size` bytes, except those written."""
    touched = np.zeros(size, dtype=bool)
    for some in pointers:
        touched[some - address] = True
    for some in written:
        touched[some - address] = False
    return int(np.count_nonzero(touched))


def _launch(executor, args, accesses, names) -> Launch:
    """Record one kernel's launch; its results belong to the owners of its inputs."""
    tensors = {}
    for name, value in zip(executor.arg_names, args, strict=False):
        if isinstance(value, Tensor):
            tensors.setdefault(_address(value), (name, value))
    for address, tensor in names.memory.items():  # whose address may be in a table
        tensors.setdefault(address, (f"{names.given[address]} at {address:x}", tensor))
    launch = Launch(executor.fn.__name__.strip("_"), "kernel")
    total = 0
    for address, (name, tensor) in tensors.items():
        size = Tensor.untyped_storage(tensor).nbytes()
        traffic = Traffic()
        # What a program reads back is still in a cache: the writes of a window come first.
        written: dict[tuple[int, int], list[np.ndarray]] = {}
        for is_write in (True, False):
            parts: dict[tuple[int, int], list[np.ndarray]] = {}  # window, size of an element
            requested = 0
            for access in accesses:
                if access.is_write is not is_write:
                    continue
                inside = access.within(address, size)
                if not inside.size:
                    continue
                requested += inside.size * access.itemsize
                window = 0 if size <= IN_L2 else access.window
                parts.setdefault((window, access.itemsize), []).append(inside)
            moved = requested
            if size <= IN_L2 or not is_write:
                moved = sum(
                    _distinct(pointers, written.get(key, []), address, size) * key[1]
                    for key, pointers in parts.items()
                )
            if is_write:
                traffic.written, written = moved, parts
            else:
                traffic.read = moved
            traffic.requested += requested
            total += requested
        if traffic.requested:
            launch.tensors[name] = traffic
    asked = sum(access.pointers.size * access.itemsize for access in accesses)
    assert total == asked, f"{launch.name} touched unknown memory: {asked - total} bytes"
    used = {a: launch.tensors[n] for a, (n, _) in tensors.items() if n in launch.tensors}
    read = [a for a, traffic in used.items() if traffic.read]
    launch.sources = names.attribute(read, [a for a, traffic in used.items() if traffic.written])
    return launch
