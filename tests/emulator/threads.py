"""Threads that run a block together."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.faults import Divergence

if TYPE_CHECKING:
    from tests.emulator.machine import Wave

Values = Any
WARP = 32
_REDUCTIONS = {
    "add": np.add,
    "min": np.fmin,  # of numbers and NaN, the number, as in PTX
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


class Threads:
    """Some threads of the programs that are on the card, in the order of their numbers.

    Args:
        wave: the programs.
        index: numbers of the threads among all of them; None: all.
    """

    def __init__(self, wave: "Wave", index: np.ndarray | None) -> None:
        self.wave, self.index = wave, index
        self.count = wave.count if index is None else len(index)

    def of(self, values: Values) -> Values:
        """Return these threads' part of an array with a value for each thread."""
        return values if self.index is None or np.ndim(values) == 0 else values[self.index]

    @cached_property
    def numbers(self) -> np.ndarray:
        return np.arange(self.count) if self.index is None else self.index

    @cached_property
    def tid_x(self) -> np.ndarray:
        return self.of(self.wave.tid)

    @cached_property
    def program(self) -> np.ndarray:
        return self.of(self.wave.program)

    @cached_property
    def warp(self) -> np.ndarray:
        return self.of(self.wave.warp)

    @cached_property
    def warp_count(self) -> int:
        """Number of warps of which threads are here."""
        warps = self.numbers // WARP
        return int(np.count_nonzero(np.diff(warps, prepend=-1)))

    @property
    def ctaid_x(self) -> Values:
        return self.of(self.wave.ctaid[0])

    @property
    def ctaid_y(self) -> Values:
        return self.of(self.wave.ctaid[1])

    @property
    def ctaid_z(self) -> Values:
        return self.of(self.wave.ctaid[2])

    @property
    def nctaid_x(self) -> np.uint32:
        return np.uint32(self.wave.grid[0])

    @property
    def nctaid_y(self) -> np.uint32:
        return np.uint32(self.wave.grid[1])

    @property
    def ntid_x(self) -> np.uint32:
        return np.uint32(self.wave.threads)

    @property
    def laneid(self) -> np.ndarray:
        return self.tid_x % np.uint32(WARP)

    @cached_property
    def missing(self) -> bool:
        """Whether threads of a warp are missing, of which others are here."""
        if self.index is None:
            return False
        if self.count % WARP:
            return True
        warps = self.index.reshape(-1, WARP)
        return bool(((warps[:, 0] % WARP != 0) | (warps[:, -1] - warps[:, 0] != WARP - 1)).any())

    def whole(self, line: int) -> None:
        """Require that all threads of each warp are here."""
        if self.missing:
            raise Divergence("threads are missing where all of a warp must take part", line)

    def _warps(self, line: int, values: Values) -> np.ndarray:
        """Return values as (warps, 32)."""
        self.whole(line)
        return np.broadcast_to(values, self.count).reshape(-1, WARP)

    def shuffle(self, line: int, way: str, values: Values, lane: Values) -> Values:
        """Return the values of other threads of the warp."""
        warps = self._warps(line, values)
        own = np.arange(WARP)
        lanes = self._warps(line, lane).astype(np.int64) & (WARP - 1)
        if way == "bfly":
            source = own ^ lanes
        elif way == "idx":
            source = lanes
        else:
            source = own + (lanes if way == "down" else -lanes)
            source = np.where((source < 0) | (source >= WARP), own, source)
        return np.take_along_axis(warps, source, 1).reshape(-1)

    def reduce(self, line: int, name: str, values: Values, mask: Values) -> Values:
        """Return the sum, the largest, ... of the warp, which all of its threads get."""
        if np.any(np.asarray(mask) != 0xFFFFFFFF):
            raise Divergence("a reduction of some threads of a warp", line)
        warps = self._warps(line, values)
        return np.repeat(_REDUCTIONS[name].reduce(warps, axis=1, dtype=warps.dtype), WARP)

    def vote(self, line: int, name: str, values: Values) -> Values:
        """Return which threads of the warp say yes, or whether any or all do."""
        warps = self._warps(line, values)
        if name == "ballot":
            bits = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
            return np.repeat((warps * bits).sum(1, dtype=np.uint32), WARP)
        return np.repeat(warps.any(1) if name == "any" else warps.all(1), WARP)
