"""Counts what a launch asks for: instructions, bytes, sectors of 32 bytes, passes over banks."""

from typing import Any

import numpy as np

from tests.emulator.threads import WARP, Threads
from tests.emulator.watch import Watch

SECTOR = 32
_BANKS = 32


class Counts(Watch):
    """One launch.

    Attributes:
        instructions: that warps have run.
        requested: bytes that threads have loaded and stored, in tensors.
        sectors: of 32 bytes, of each request of a warp.
        least_sectors: as many as the different bytes of each request fill.
        passes: over the banks of the shared memory.
        least_passes: without conflicts.
        touched: per tensor, whether each byte has been loaded (1) or stored (2).
    """

    def __init__(self) -> None:
        self.instructions = self.requested = self.sectors = self.least_sectors = 0
        self.passes = self.least_passes = 0
        self.touched: list[np.ndarray] = []
        self.shared_bytes = 0

    @property
    def needed(self) -> int:
        """Different bytes that have been loaded, and stored."""
        return sum(int(np.bitwise_count(part).sum()) for part in self.touched)

    def begins(self, wave: Any) -> None:
        if not self.touched:
            regions = wave.launch.memory.regions
            self._starts = np.array([region.start for region in regions], np.int64)
            self.touched = [np.zeros(r.end - r.start, np.uint8) for r in regions]
            self.shared_bytes = wave.launch.shared_size

    def runs(self, block: Any, g: Threads) -> None:
        self.instructions += block.size * len(np.unique(g.numbers // WARP))

    def accessed(
        self,
        line: int,
        g: Threads,
        places: np.ndarray | None,
        addresses: np.ndarray,
        width: int,
        write: bool,
        atomic: bool,
        same: Any = None,
    ) -> None:
        warps = _warps(g, places)
        self.requested += width * len(addresses)
        every = (addresses[:, None] + np.arange(width)).reshape(-1)
        pairs = np.unique(np.stack([np.repeat(warps, width), every], 1), axis=0)
        sectors = np.unique(np.stack([pairs[:, 0], pairs[:, 1] // SECTOR], 1), axis=0)
        self.sectors += len(sectors)
        sizes = np.unique(pairs[:, 0], return_counts=True)[1]
        self.least_sectors += int((-(-sizes // SECTOR)).sum())
        at = self._starts.searchsorted(addresses, "right") - 1
        for one in np.unique(at):
            offsets = addresses[at == one] - self._starts[one]
            where = (offsets[:, None] + np.arange(width)).reshape(-1)
            self.touched[one][where] |= 2 if write else 1

    def shared(
        self,
        line: int,
        g: Threads,
        places: np.ndarray | None,
        addresses: np.ndarray,
        width: int,
        write: bool,
    ) -> None:
        lanes = g.numbers if places is None else g.numbers[places]
        words = max(width // 4, 1)
        # A pass serves 128 bytes: a warp's 4 bytes a thread, a quarter's 16.
        groups = lanes // (WARP // words)
        every = ((addresses // 4)[:, None] + np.arange(words)).reshape(-1)
        pairs = np.unique(np.stack([np.repeat(groups, words), every], 1), axis=0)
        banks = np.stack([pairs[:, 0], pairs[:, 1] % _BANKS], 1)
        found, sizes = np.unique(banks, axis=0, return_counts=True)
        starts = np.flatnonzero(np.diff(found[:, 0], prepend=-1))
        self.passes += int(np.maximum.reduceat(sizes, starts).sum())
        self.least_passes += len(starts)


def _warps(g: Threads, places: np.ndarray | None) -> np.ndarray:
    numbers = g.numbers if places is None else g.numbers[places]
    return numbers // WARP
