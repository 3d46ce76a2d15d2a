"""A driver for Triton below which the emulator runs instead of a card.

Launches go their whole way: `kernel[grid](...)`, remembered launches and played tapes, Triton's
specialisation and its key, the compiler and its assembler, the launcher in C that packs the
arguments. Its call of ``cuLaunchKernelEx`` ends here, with the addresses of the parameters.
"""

import contextlib
import ctypes
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.backends import nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime import driver as triton_driver
from triton.runtime.jit import JITFunction

from tests.emulator.allocations import Allocations, span
from tests.emulator.approximate import Approximate
from tests.emulator.global_memory import GlobalMemory, Region
from tests.emulator.machine import MOST_BLOCKS, Launch
from tests.emulator.on_card import card_tensors
from tests.emulator.ptx import PtxError
from tests.emulator.schedule import Lockstep, Schedule
from tests.emulator.stub_library import Driver, stub_library
from tests.internals import forget_recordings, kernels

FIRST_ARGUMENT = 9
"""Index of a kernel's first argument among a launcher's, behind the grid, hooks and the like."""
_MAX_SHARED = 232448
"""Bytes of shared memory that a program may have, of sm_90 and sm_100."""
_binaries: dict[int, "Binary"] = {}


class Binary(NamedTuple):
    """A kernel that has been loaded: its name, what it was compiled for, and its PTX."""

    name: str
    variant: str
    ptx: str


class Launched(NamedTuple):
    """What was launched.

    Attributes:
        name: name of the kernel.
        variant: type of its first pointer, and its compile-time choices.
        ptx: what ran.
        grid: numbers of programs.
        threads: threads of a program.
        elements: elements of the largest tensor.
        watch: what saw it.
    """

    name: str
    variant: str
    ptx: str
    grid: tuple[int, int, int]
    threads: int
    elements: int
    watch: tuple[Any, ...]


class Emulation:
    """Runs launches.

    Args:
        capability: compute capability, such as (9, 0).
        schedule: returns the order of warps and programs; called for every launch.
        error_seed: seed of the errors of approximate functions; None: they are rounded once.
        watch: called for every launch, returns what sees its accesses.
        edit: changes the PTX before it runs, such as for planted faults.
        most_blocks: bound on what the programs on the card run.
    """

    def __init__(
        self,
        capability: tuple[int, int] = (9, 0),
        schedule: Callable[[], Schedule] = Lockstep,
        error_seed: int | None = None,
        watch: Callable[[], Sequence[Any]] = tuple,
        edit: Callable[[str, str], str] | None = None,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        self.capability = capability
        self.schedule, self.watch, self.edit = schedule, watch, edit
        self.most_blocks = most_blocks
        self.approximate = Approximate(error_seed)
        self.allocations = Allocations()
        self.launches: list[Launched] = []
        self.error: BaseException | None = None
        self.last: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        """Triton's launcher in the last launch, and its arguments."""
        self._named: tuple[int, list[Tensor]] = (0, [])
        self._arguments: dict[str, Tensor] = {}

    def named(self, table: Tensor, tensors: Sequence[Tensor]) -> None:
        """Allow launches with a table access to the tensors whose addresses it has."""
        self._named = table.untyped_storage().data_ptr(), list(tensors)

    def launching(self, arguments: dict[str, Tensor]) -> None:
        """Note the tensors of the launch that comes next."""
        self._arguments, self.error = arguments, None

    def launched(self, config: Any, function: int, parameters: Any) -> int:
        """Run a kernel; called by the library that stands for the driver's."""
        try:
            self._run(config.contents, _binaries[function], parameters)
        except BaseException as error:  # reported by the launcher, which C has called
            self.error = error
            return 1
        return 0

    def _run(self, config: Any, binary: Binary, parameters: Any) -> None:
        text = binary.ptx if self.edit is None else self.edit(binary.name, binary.ptx)
        grid = config.grid_x, config.grid_y, config.grid_z
        watch = tuple(self.watch())
        memory = GlobalMemory(list(self._regions()), watch)
        launch = Launch(
            text,
            b"",
            grid,
            config.shared,
            memory,
            self.schedule(),
            self.approximate,
            self.most_blocks,
        )
        kernel = launch.kernel
        launch.parameters = _packed(kernel.parameters, parameters)
        if config.block_x != kernel.threads:
            raise PtxError(f"{config.block_x} threads are launched, of {kernel.threads}")
        elements = max((x.numel() for _, x in self._tensors()), default=0)
        what = binary.name, binary.variant, text
        self.launches.append(Launched(*what, grid, kernel.threads, elements, watch))
        launch.run()

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Return what the launch was given, and what its table of addresses names."""
        tensors = list(self._arguments.items())
        table, named = self._named
        if any(x.untyped_storage().data_ptr() == table for _, x in tensors):
            tensors += [(f"tensor {i} of the table", x) for i, x in enumerate(named)]
        return tensors

    def _regions(self) -> Iterator[Region]:
        for name, x in self._tensors():
            written, first = self.allocations.written(x)
            yield Region(x.data_ptr(), x.data_ptr() + span(x), name, written, first)


_current: list[Emulation] = []


def approximate_functions() -> Approximate:
    """Return the approximate functions of the card that is emulated now."""
    return _current[-1].approximate


@contextlib.contextmanager
def emulated(assembles: bool = False, **options: Any) -> Iterator[Emulation]:
    """Run within, on CPU tensors, what is launched on a card.

    Args:
        assembles: whether Triton's assembler runs, too, a quarter of the time; the PTX is run.
        options: see `Emulation`.
    """
    assert not _current, "one emulation at a time"
    emulation = Emulation(**options)
    library = stub_library()
    adamw = importlib.import_module("torch_fp8.kernels.adamw")
    tables = adamw._tables

    def named_tables(entries: Any, *rest: Any, **options: Any) -> Any:
        table, *others = tables(entries, *rest, **options)
        leaves = tree_leaves((entries, rest, options))
        emulation.named(table, [x for x in leaves if isinstance(x, Tensor)])
        return table, *others

    with contextlib.ExitStack() as stack:
        folders = [nvidia.driver.libdevice_dir, str(library.folder)]
        stack.enter_context(mock.patch.object(nvidia.driver, "library_dirs", return_value=folders))
        for owner, name, stub in (
            (triton_driver, "_active", _Driver(emulation)),
            (CompiledKernel, "_init_handles", _init_handles),
            (torch.cuda, "get_device_capability", lambda device=None: emulation.capability),
            (adamw, "_tables", named_tables),
        ):
            stack.enter_context(mock.patch.object(owner, name, stub))
        for group in (
            knobs.compilation,
            knobs.cache,
        ):  # which are variables of the environment, too
            stack.enter_context(group.scope())
        knobs.compilation.disable_line_info = True  # a fourteenth of the time
        if not assembles:  # what is cached then has no code
            stub = lambda *args: b""  # noqa: E731
            stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", stub))
            knobs.cache.dir = f"{knobs.cache.dir}/not_assembled"
        library.handle(emulation.launched)
        stack.callback(library.handle, None)
        _current.append(emulation)
        stack.callback(_current.pop)
        _forget_launches()
        stack.callback(_forget_launches)
        stack.enter_context(emulation.allocations)
        stack.enter_context(card_tensors(modes=1))
        yield emulation


def all_kernels() -> dict[str, JITFunction]:
    """Return the engine's kernels, and their device functions, by name."""
    names = [m.name for m in pkgutil.iter_modules(kernels.__path__, "torch_fp8.kernels.")]
    values = (vars(importlib.import_module(name)).items() for name in names)
    return {name: x for named in values for name, x in named if isinstance(x, JITFunction)}


def _forget_launches() -> None:
    """Let kernels and operators forget what they have launched on another card."""
    for kernel in all_kernels().values():
        vars(kernel).pop("_launches", None)
        kernel.device_caches.clear()
    forget_recordings()


_load = CompiledKernel._init_handles


def _init_handles(self: CompiledKernel) -> None:
    _load(self)
    if self.function not in _binaries:
        _binaries[self.function] = Binary(self.name, _variant(self.src), self.asm["ptx"])


def _variant(src: Any) -> str:
    """Return what `benchmarks.evidence.kernel_resources` calls a kernel's variant."""
    names = src.fn.arg_names
    flags = [(names[place], value) for (place, *_), value in src.constants.items()]
    types = [kind for kind in src.signature.values() if kind.startswith("*")]
    order = sorted(
        (names.index(name), f"{name}={value}") for name, value in flags if name.isupper()
    )
    return " ".join([types[0], *(text for _, text in order)])


def _packed(places: dict[str, tuple[int, int]], parameters: Any) -> bytes:
    """Return the bytes of a kernel's parameters, which lie where their addresses say."""
    size = max((offset + size for offset, size in places.values()), default=0)
    block = bytearray(size)
    for i, (offset, length) in enumerate(places.values()):
        block[offset : offset + length] = ctypes.string_at(parameters[i], length)
    return bytes(block)


class _Driver(Driver):
    """A driver whose binaries are emulated.

    Args:
        emulation: whose card it is.
    """

    def __init__(self, emulation: Emulation) -> None:
        super().__init__(emulation.capability)
        self.launcher_cls = _Launcher
        # The launcher of Triton 3.7 is part of its module; that of 3.6 is built for each kernel.
        module = nvidia.driver.CudaUtils() if hasattr(nvidia.driver, "PyKernelArg") else None
        self.utils = SimpleNamespace(**({} if module is None else vars(module)))
        self.utils.load_binary = _load_binary
        self.utils.get_device_properties = lambda device: {"max_shared_mem": _MAX_SHARED}


def _load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
    """Return a module, a function, its registers, its spills and the most threads of a program."""
    return 1, len(_binaries) + 1, 0, 0, 1024


class _Launcher:
    """Triton's launcher, which is told where the tensors are whose addresses it packs.

    Args:
        src: the kernel's source.
        metadata: metadata of its binary.
    """

    def __init__(self, src: Any, metadata: Any) -> None:
        self._names = src.fn.arg_names
        self._launcher = nvidia.driver.CudaLauncher(src, metadata)

    def __call__(self, *args: Any) -> None:
        emulation = _current[-1]
        emulation.last = self, args
        values = args[FIRST_ARGUMENT:]
        pairs = zip(self._names, values, strict=True)
        emulation.launching({name: x for name, x in pairs if isinstance(x, Tensor)})
        try:
            self._launcher(*args)
        except RuntimeError:
            if emulation.error is None:
                raise
        if emulation.error is not None:
            raise emulation.error
