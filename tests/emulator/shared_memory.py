"""The memory that the warps of a program share, with a shadow that says who has accessed what."""

from typing import Any

import numpy as np

from tests.emulator.accesses import TYPES, Access, packed, unpacked
from tests.emulator.faults import Misaligned, OutOfBounds, Race, Uninitialised
from tests.emulator.threads import WARP, Threads

Values = Any
_SETTLED = 255
"""In the shadow: written before the last barrier. 0: never. Else: by this warp, since."""
_SEVERAL = 254
"""In the readers' shadow: read by more than one warp since the last barrier."""


class SharedMemory:
    """A program's bytes lie one after another, those of all programs on the card, too.

    Args:
        programs: number of them.
        size: bytes of a program.
        watch: sees each access.
    """

    def __init__(self, programs: int, size: int, watch: tuple[Any, ...] = ()) -> None:
        self.size = size
        self._stride = -(-size // 16) * 16
        whole = programs * self._stride
        self._bytes = np.zeros(whole + 16, np.uint8)
        at = -self._bytes.ctypes.data % 16
        self._bytes = self._bytes[at : at + whole]
        self._views = {width: self._bytes.view(dtype) for width, dtype in TYPES.items()}
        self._writers = np.zeros(whole, np.uint8)
        self._readers = np.zeros(whole, np.uint8)
        self.watch = watch

    def settle(self, programs: np.ndarray) -> None:
        writers = self._writers.reshape(-1, self._stride) if self._stride else self._writers[None]
        readers = self._readers.reshape(-1, self._stride) if self._stride else self._readers[None]
        if self._stride:
            part = writers[programs]
            writers[programs] = np.where(part != 0, np.uint8(_SETTLED), part)
            readers[programs] = 0

    def load(
        self, line: int, g: Threads, address: Values, bits: int, vector: int, guard: Values
    ) -> Values:
        access = Access(line, g, address, guard, bits // 8 * vector, False)
        where = self._check_read(access)
        return unpacked(self._views[access.width][where // access.width], bits, vector, access)

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
        self._write(access, packed(values, bits, access))

    def load_matrices(
        self, line: int, g: Threads, address: Values, count: int, trans: bool
    ) -> np.ndarray:
        """Return `ldmatrix`'s registers, (count, threads).

        Of each matrix, 8 threads give the addresses of its rows of 16 bytes. A thread gets two
        neighbours of 16 bits of a row: of row i // 4 and column i % 4, or transposed.
        """
        where = self._check_read(self._rows(line, g, address, count, False))
        rows = self._views[16][where // 16].view(np.uint16)
        matrices = rows.reshape(-1, count, 8, 8)
        if trans:
            matrices = matrices.swapaxes(2, 3)
        words = np.ascontiguousarray(matrices).view(np.uint32)
        return np.ascontiguousarray(words.transpose(1, 0, 2, 3)).reshape(count, -1)

    def store_matrices(
        self, line: int, g: Threads, address: Values, values: tuple[Values, ...], trans: bool
    ) -> None:
        """Do what `stmatrix` does: `load_matrices` the other way round."""
        count = len(values)
        access = self._rows(line, g, address, count, True)
        words = np.stack([np.broadcast_to(value, g.count).reshape(-1, 8, 4) for value in values], 1)
        matrices = np.ascontiguousarray(words).view(np.uint16)
        if trans:
            matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
        self._write(access, matrices.reshape(-1, 8).view(TYPES[16])[:, 0])

    def _rows(self, line: int, g: Threads, address: Values, count: int, write: bool) -> Access:
        """Return the access to rows of matrices, whose addresses some of the threads give."""
        g.whole(line)
        return Access(line, g, address, np.arange(g.count) % WARP < 8 * count, 16, write)

    def _write(self, access: Access, values: np.ndarray) -> None:
        where, warps, width, line = self._place(access), access.warp, access.width, access.line
        if not len(where):
            return
        others = _unlike(self._readers, where, warps, width, 0)
        if others is not None:
            what = "writes shared memory that another warp has read since the last barrier"
            raise Race(what, line)
        others = _unlike(self._writers, where, warps, width, _SETTLED, 0)
        if others is not None:
            self._require_equal(line, others, where, values, width)
        self._views[width][where // width] = values
        _fill(self._writers, where, warps, width)

    def _require_equal(
        self, line: int, others: np.ndarray, where: np.ndarray, values: np.ndarray, width: int
    ) -> None:
        """Let warps write the same bytes, as those do that hold copies of a block."""
        if (self._views[width][where[others] // width] != values[others]).any():
            what = "writes shared memory that another warp has written since the last barrier"
            raise Race(what, line)

    def _check_read(self, access: Access) -> np.ndarray:
        """Return where the bytes are, which have been written before the last barrier."""
        where, warps, width, line = self._place(access), access.warp, access.width, access.line
        if not len(where):
            return where
        others = _unlike(self._writers, where, warps, width, _SETTLED)
        if others is not None:
            writers = self._writers[where[others, None] + np.arange(width)]
            if (writers == 0).any():
                wrong = int(access.addresses[others[np.flatnonzero((writers == 0).any(1))[0]]])
                raise Uninitialised(f"reads byte {wrong} of shared memory, never written", line)
            what = "reads shared memory that another warp has written since the last barrier"
            raise Race(what, line)
        others = _unlike(self._readers, where, warps, width, 0)
        _fill(self._readers, where, warps, width)
        if others is not None:
            self._readers[where[others, None] + np.arange(width)] = _SEVERAL
        return where

    def _place(self, access: Access) -> np.ndarray:
        """Return where the bytes are among all programs'."""
        if not len(access):
            return access.addresses
        width, line = access.width, access.line
        wrong = access.misaligned()
        if wrong is not None:
            raise Misaligned(f"{width} bytes at {wrong} of shared memory", line)
        last = int(access.addresses.max())
        if last + width > self.size:
            raise OutOfBounds(f"{width} bytes at {last} of {self.size} of shared memory", line)
        for watch in self.watch:
            watch.shared(access)
        return access.addresses + access.program * self._stride


def _unlike(
    shadow: np.ndarray, where: np.ndarray, warps: np.ndarray, width: int, *fine: int
) -> np.ndarray | None:
    """Return the accesses of which the shadow has other bytes than the warp's or these."""
    part = min(width, 8)
    view = shadow.view(TYPES[part])
    ones = int("01" * part, 16)
    dtype = TYPES[part].type
    wrong = np.zeros(len(where), bool)
    for start in range(0, width, part):
        flags = view[(where + start) // part]
        same = flags == warps.astype(dtype) * dtype(ones)
        for value in fine:
            same |= flags == dtype(value * ones)
        wrong |= ~same
    if not wrong.any():
        return None
    doubtful = np.flatnonzero(wrong)
    each = shadow[where[doubtful, None] + np.arange(width)]
    same = each == warps[doubtful, None]
    for value in fine:
        same |= each == value
    others = doubtful[~same.all(1)]
    return others if len(others) else None


def _fill(shadow: np.ndarray, where: np.ndarray, warps: np.ndarray, width: int) -> None:
    part = min(width, 8)
    dtype = TYPES[part].type
    values = warps.astype(dtype) * dtype(int("01" * part, 16))
    for start in range(0, width, part):
        shadow.view(TYPES[part])[(where + start) // part] = values
