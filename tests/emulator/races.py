"""Finds accesses to tensors that nothing orders, in whatever order they have come.

Each program has a clock, which barriers and releases move on. A shadow of every byte says who has
written it last, and when; an access by another warp must know of it: by a barrier of its own
program since then, or from an acquired atomic that was released after. What a program has acquired
is known to all of its warps at once; of several readers the last one is kept.
"""

from typing import Any

import numpy as np

from tests.emulator.accesses import Access
from tests.emulator.faults import Race
from tests.emulator.threads import Threads
from tests.emulator.watch import Same, Watch

_MOST_PROGRAMS = 4096


class _Shadow:
    """Who accessed each byte last.

    Args:
        size: number of bytes.
    """

    def __init__(self, size: int) -> None:
        self.program = np.full(size, -1, np.int32)
        self.clock = np.zeros(size, np.int32)
        self.warp = np.zeros(size, np.uint8)
        self.atomic = np.zeros(size, bool)

    def write(self, where: Any, program: Any, clock: Any, warp: Any, atomic: bool) -> None:
        self.program[where], self.clock[where] = program, clock
        self.warp[where], self.atomic[where] = warp, atomic


class Races(Watch):
    """One launch's programs, and what they know of each other."""

    def __init__(self) -> None:
        self._clock: np.ndarray | None = None

    def begins(self, wave: Any) -> None:
        if self._clock is not None:
            return
        regions = wave.launch.memory.regions
        sizes = [region.end - region.start for region in regions]
        self._starts = np.array([region.start for region in regions], np.int64)
        self._names = [region.name for region in regions]
        self._offsets = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        self._writers, self._readers = _Shadow(sum(sizes)), _Shadow(sum(sizes))
        self._others = _Shadow(sum(sizes))
        """Readers of another program than the last."""
        count = int(np.prod(wave.grid))
        assert count <= _MOST_PROGRAMS, f"{count} programs are too many for a search for races"
        self._clock = np.ones(count, np.int32)
        self._barrier = np.zeros(count, np.int32)
        # What a program, the row, knows of another: all before a clock, and of one warp more.
        self._known = np.zeros((count, count), np.int32)
        self._known_of_warp = np.zeros((count, count), np.int32)
        self._known_warp = np.zeros((count, count), np.uint8)
        self._released: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def passes_barrier(self, wave: Any, programs: np.ndarray) -> None:
        assert self._clock is not None
        numbers = wave.programs[programs]
        self._clock[numbers] += 1
        self._barrier[numbers] = self._clock[numbers]

    def synchronises(self, g: Threads, place: int, address: int, order: str) -> None:
        assert self._clock is not None
        number = int(g.wave.programs[g.program[place]])
        known = self._known[number], self._known_of_warp[number], self._known_warp[number]
        released = self._released.get(address)
        if order in ("acquire", "acq_rel") and released is not None:
            newer = released[1] > known[1]
            for mine, theirs in zip(known[1:], released[1:], strict=True):
                mine[newer] = theirs[newer]
            np.maximum(known[0], released[0], out=known[0])
        if order in ("release", "acq_rel"):
            self._clock[number] += 1
            mine = tuple(x.copy() for x in known)
            mine[0][number] = self._barrier[number]
            mine[1][number], mine[2][number] = self._clock[number], g.warp[place]
            self._released[address] = mine

    def accessed(self, access: Access, same: Same | None = None) -> None:
        assert self._clock is not None
        program = access.threads.wave.programs[access.program][:, None]
        warp, atomic = access.warp[:, None], access.atomic
        at = self._starts.searchsorted(access.addresses, "right") - 1
        where = access.bytes + (self._offsets[at] - self._starts[at])[:, None]
        line, before = access.line, same.before if same else np.zeros(where.shape, bool)
        self._require_order(line, self._writers, where, program, warp, atomic, at, before)
        if access.write:
            for readers in (self._readers, self._others):
                self._require_order(line, readers, where, program, warp, atomic, at, before)
            self._writers.write(where, program, self._clock[program], warp, atomic)
            if same:  # of two programs in one instruction, one is not seen above
                rest = at, same.after
                self._require_order(line, self._writers, where, program, warp, atomic, *rest)
        else:
            self._read(where, program, warp)

    def _read(self, where: np.ndarray, program: np.ndarray, warp: np.ndarray) -> None:
        """Note readers, of which several may read a byte in one instruction."""
        assert self._clock is not None
        readers = where, program, self._clock[program], warp
        self._note_reader(*(np.ascontiguousarray(x[::-1]) for x in readers))
        self._note_reader(*readers)

    def _note_reader(
        self, where: np.ndarray, program: np.ndarray, clock: np.ndarray, warp: np.ndarray
    ) -> None:
        last = self._readers
        another = last.program[where] != program
        if another.any():
            moved = where[another]
            values = last.program[moved], last.clock[moved], last.warp[moved], False
            self._others.write(moved, *values)
        last.write(where, program, clock, warp, False)

    def _require_order(
        self,
        line: int,
        shadow: _Shadow,
        where: np.ndarray,
        program: np.ndarray,
        warp: np.ndarray,
        atomic: bool,
        at: np.ndarray,
        harmless: np.ndarray,
    ) -> None:
        other, clock, theirs = shadow.program[where], shadow.clock[where], shadow.warp[where]
        fine = harmless | (other < 0) | ((other == program) & (theirs == warp))
        if atomic:
            fine |= shadow.atomic[where]
        if fine.all():
            return
        own = (other == program) & (clock < self._barrier[program])
        known = clock < self._known[program, other]
        known |= (theirs == self._known_warp[program, other]) & (
            clock < self._known_of_warp[program, other]
        )
        fine |= own | ((other != program) & known)
        if not fine.all():
            i, j = np.argwhere(~fine)[0]
            who = f"warp {warp[i, 0]} of program {program[i, 0]}"
            whose = f"warp {theirs[i, j]} of program {other[i, j]}"
            did = "wrote" if shadow is self._writers else "read"
            what = f"{who} accesses what {whose} {did} of {self._names[at[i]]}; nothing orders them"
            raise Race(what, line)
