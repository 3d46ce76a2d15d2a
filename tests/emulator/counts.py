"""Counts what a launch asks for: instructions, bytes, sectors of 32 bytes, passes over banks."""

from typing import Any

import numpy as np

from tests.emulator.accesses import TYPES, Access
from tests.emulator.threads import WARP, Threads
from tests.emulator.watch import Watch

SECTOR = 32
_BANKS = 32


class Counts(Watch):
    """One launch.

    Attributes:
        instructions: number of instructions that warps have run.
        requested: bytes that threads have loaded and stored, in tensors.
        sectors: sectors of 32 bytes, summed over the requests of warps.
        least_sectors: sectors that the different bytes of each request fill.
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
            self._bases = [region.start & -16 for region in regions]
            sizes = [
                (r.end - base + 15) & -16 for r, base in zip(regions, self._bases, strict=True)
            ]
            self.touched = [np.zeros(size, np.uint8) for size in sizes]
            self.shared_bytes = wave.launch.shared_size

    def runs(self, block: Any, g: Threads) -> None:
        self.instructions += block.size * g.warp_count

    def accessed(self, access: Access, same: Any = None) -> None:
        warps, width, addresses = access.numbers // WARP, access.width, access.addresses
        self.requested += width * len(access)
        # An access is aligned to its width, which divides a sector.
        self.sectors += len(_pairs(warps, addresses // SECTOR)[0])
        elements = np.bincount(_pairs(warps, addresses // width)[0])
        self.least_sectors += int((-(-elements * width // SECTOR)).sum())
        at = self._starts.searchsorted(addresses, "right") - 1
        for one in range(int(at.min()), int(at.max()) + 1):
            self._touch(one, addresses[at == one], width, 2 if access.write else 1)

    def _touch(self, region: int, addresses: np.ndarray, width: int, flag: int) -> None:
        part = min(width, 8)
        words = self.touched[region].view(TYPES[part])
        flags = words.dtype.type(flag * int("01" * part, 16))
        first = (addresses - self._bases[region]) // part
        for word in range(width // part):
            words[first + word] |= flags

    def shared(self, access: Access) -> None:
        words = max(access.width // 4, 1)
        # A pass serves 128 bytes: a warp's 4 bytes a thread, a quarter's 16.
        requests = access.numbers // (WARP // words)
        every = ((access.addresses // 4)[:, None] + np.arange(words)).reshape(-1)
        number, word = _pairs(np.repeat(requests, words), every)
        conflicts = np.bincount(number * _BANKS + word % _BANKS, minlength=_BANKS)
        most = np.maximum.reduceat(conflicts, np.arange(0, len(conflicts), _BANKS))
        self.passes += int(most.sum())
        self.least_passes += int(np.count_nonzero(most))


def _pairs(groups: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different pairs of a group and a value, groups counted from 0."""
    least, first = int(values.min()), int(groups.min())
    size = int(values.max()) - least + 1
    keys = np.sort((groups - first) * size + (values - least))
    keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
    return keys // size, keys % size + least
