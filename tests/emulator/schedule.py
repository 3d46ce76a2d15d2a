"""The order in which warps and programs run."""

from collections.abc import Sequence

import numpy as np

from tests.emulator.threads import WARP


class Lockstep:
    """All programs run the same instruction at the same time; those that are behind come first."""

    lanes = 8192
    """Threads that are on the card at once, but for those of one program."""

    def programs(self, count: int) -> np.ndarray:
        """Return the programs in the order in which they start."""
        return np.arange(count)

    def choose(
        self, runnable: dict[int, np.ndarray], whole: Sequence[bool]
    ) -> tuple[int, np.ndarray]:
        """Choose who runs next.

        Args:
            runnable: block -> numbers of the threads that are about to run it.
            whole: for each block, whether it needs all threads of a warp.
        """
        block = min(runnable)
        return block, runnable[block]

    def order(self, count: int) -> Sequence[int]:
        return range(count)

    def __repr__(self) -> str:
        return "lockstep"


class Shuffled:
    """Warps run block by block, and programs start, in a random order.

    Args:
        seed: seed of the order.
        lanes: threads that are on the card at once.
    """

    def __init__(self, seed: int, lanes: int = 4096) -> None:
        self.seed, self.lanes = seed, lanes
        self._random = np.random.default_rng(seed)

    def programs(self, count: int) -> np.ndarray:
        """Return the programs in the order in which they start."""
        return self._random.permutation(count)

    def choose(
        self, runnable: dict[int, np.ndarray], whole: Sequence[bool]
    ) -> tuple[int, np.ndarray]:
        """Choose about half of the warps that wait at a random block, or fewer."""
        blocks = list(runnable)
        for block in self._random.permutation(blocks):
            index = runnable[block]
            warps, sizes = np.unique(index // WARP, return_counts=True)
            if whole[block]:
                warps = warps[sizes == WARP]  # the others of the warp come later
            if len(warps):
                break
        else:
            block = min(blocks)
            return block, runnable[block]
        lucky = warps[self._random.random(len(warps)) < self._random.choice((0.2, 0.6, 1.0))]
        if not len(lucky):
            lucky = self._random.choice(warps, 1)
        return int(block), index[np.isin(index // WARP, lucky)]

    def order(self, count: int) -> Sequence[int]:
        return self._random.permutation(count)

    def __repr__(self) -> str:
        return f"shuffled by seed {self.seed}"


Schedule = Lockstep | Shuffled
