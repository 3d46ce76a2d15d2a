"""The process's own memory, as a launch may access it: the tensors that it was given."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.emulator.accesses import TYPES, Access, packed, unpacked
from tests.emulator.faults import Misaligned, OutOfBounds, Uninitialised
from tests.emulator.threads import Threads
from tests.emulator.watch import Same

Values = Any
_BASE = 1 << 16
_SIZE = (1 << 47) - _BASE
_EVERYTHING = np.frombuffer((ctypes.c_uint8 * _SIZE).from_address(_BASE), np.uint8)
"""All addresses of the process; only what is inside of a launch's tensors is touched."""
_VIEWS = {width: _EVERYTHING[: _SIZE // 16 * 16].view(dtype) for width, dtype in TYPES.items()}


@dataclass
class Region:
    """Memory that a launch may access.

    Attributes:
        start: address of the first byte.
        end: address behind the last byte.
        name: name of the tensor, for messages.
        written: for each byte of the allocation whether it has been written; None: all have been.
        first: address of the first byte of the allocation.
    """

    start: int
    end: int
    name: str
    written: np.ndarray | None = None
    first: int = 0


class GlobalMemory:
    """The regions of a launch.

    Args:
        regions: in any order; they may overlap.
        watch: sees each access, such as `counts.Counts` and `races.Races`.
    """

    def __init__(self, regions: list[Region], watch: tuple[Any, ...] = ()) -> None:
        self.regions = merged = _merged(regions)
        self._starts = np.array([r.start for r in merged], np.int64)
        self._ends = np.array([r.end for r in merged], np.int64)
        self._tracked = any(r.written is not None for r in merged)
        self.watch = watch

    def load(
        self, line: int, g: Threads, address: Values, bits: int, vector: int, guard: Values
    ) -> Values:
        """Return what is at the addresses.

        Args:
            line: line of the PTX.
            g: the threads.
            address: uint64.
            bits: size of each register.
            vector: number of registers.
            guard: whether a thread loads; None: all do.
        """
        access = Access(line, g, address, guard, bits // 8 * vector, False)
        self._check(access)
        values = _VIEWS[access.width][(access.addresses - _BASE) // access.width]
        for watch in self.watch if len(access) else ():
            watch.accessed(access)
        return unpacked(values, bits, vector, access)

    def store(
        self,
        line: int,
        g: Threads,
        address: Values,
        bits: int,
        values: tuple[Values, ...],
        guard: Values,
    ) -> None:
        access = Access(line, g, address, guard, bits // 8 * len(values), True)
        self._check(access)
        view, where = _VIEWS[access.width], (access.addresses - _BASE) // access.width
        new = packed(values, bits, access)
        if self.watch and len(access):
            old = view[where]
            view[where] = new
            same = Same(*(_bytes(x) == _bytes(new) for x in (old, view[where])))
            for watch in self.watch:
                watch.accessed(access, same)
        else:
            view[where] = new

    def one(self, line: int, g: Threads, place: int, address: int, dtype: np.dtype) -> np.ndarray:
        """Return the one element that an atomic operation reads and writes."""
        guard = np.arange(g.count) == place
        access = Access(line, g, np.int64(address), guard, dtype.itemsize, True, atomic=True)
        self._check(access, reads=True)
        for watch in self.watch:
            watch.accessed(access)
        at = (address - _BASE) // dtype.itemsize
        return _VIEWS[dtype.itemsize][at : at + 1].view(dtype)

    def _check(self, access: Access, reads: bool = False) -> None:
        """Require that accesses are aligned, within tensors, and read what was written."""
        if not len(access):
            return
        addresses, width, line = access.addresses, access.width, access.line
        wrong = access.misaligned()
        if wrong is not None:
            raise Misaligned(f"{width} bytes at {wrong:#x}, {self._near(wrong)}", line)
        lowest, highest = int(addresses.min()), int(addresses.max())
        at = int(self._starts.searchsorted(lowest, "right")) - 1
        write = access.write and not reads
        if at >= 0 and highest + width <= self._ends[at]:
            if self._tracked:
                self._check_written(line, at, addresses, width, write)
        else:
            at = self._starts.searchsorted(addresses, "right") - 1
            inside = (at >= 0) & (addresses + width <= self._ends[at])
            if not inside.all():
                wrong = int(addresses[np.flatnonzero(~inside)[0]])
                verb = "writes" if write else "reads"
                raise OutOfBounds(f"{verb} {width} bytes at {wrong:#x}, {self._near(wrong)}", line)
            if self._tracked:
                for one in np.unique(at):
                    self._check_written(line, int(one), addresses[at == one], width, write)

    def _check_written(
        self, line: int, at: int, addresses: np.ndarray, width: int, write: bool
    ) -> None:
        region = self.regions[at]
        if region.written is None:
            return
        offsets = (addresses - region.first)[:, None] + np.arange(width)
        if write:
            region.written[offsets] = 1
        elif not region.written[offsets].all():
            wrong = int(addresses[np.flatnonzero(~region.written[offsets].all(1))[0]])
            raise Uninitialised(f"reads {wrong:#x}, {self._near(wrong)}, never written", line)

    def _near(self, address: int) -> str:
        """Return where an address lies, or what is before it."""
        before = [r for r in self.regions if r.start <= address]
        if not before:
            return "before all tensors"
        region = before[-1]
        if address < region.end:
            return f"byte {address - region.start} of {region.name}"
        return f"{address - region.end} bytes behind the end of {region.name}"


def _bytes(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint8).reshape(len(values), -1)


def _merged(regions: list[Region]) -> list[Region]:
    merged: list[Region] = []
    for region in sorted((r for r in regions if r.end > r.start), key=lambda r: (r.start, r.end)):
        last = merged[-1] if merged else None
        if last is not None and region.start < last.end:
            last.end = max(last.end, region.end)
            if last.name != region.name:
                last.name = f"{last.name}, {region.name}"
        else:
            merged.append(Region(**vars(region)))
    return merged
