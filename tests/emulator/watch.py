"""What sees a launch while it runs."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.emulator.threads import Threads

if TYPE_CHECKING:
    from tests.emulator.accesses import Access
    from tests.emulator.machine import Wave
    from tests.emulator.translate import Translated


class Same(NamedTuple):
    """What a store has to do with its memory, (accesses, width) bool.

    Attributes:
        before: whether the byte was there already.
        after: whether it is there now, and not that of another thread.
    """

    before: np.ndarray
    after: np.ndarray


class Watch:
    """Sees nothing; others override what they want to see."""

    def begins(self, wave: "Wave") -> None:
        """See programs that come to the card."""

    def runs(self, block: "Translated", g: Threads) -> None:
        """See threads that are about to run a block."""

    def accessed(self, access: "Access", same: "Same | None" = None) -> None:
        """See an access to tensors, when it has been done.

        Args:
            access: an access of at least one thread.
            same: which bytes were written that were there before, and which are there now.
        """

    def shared(self, access: "Access") -> None:
        """See an access to shared memory."""

    def synchronises(self, g: Threads, place: int, address: int, order: str) -> None:
        """See an atomic operation of one thread: "acq_rel", "acquire", "release", "relaxed"."""

    def passes_barrier(self, wave: "Wave", programs: np.ndarray) -> None:
        """See programs, as numbered on the card, that have passed a barrier."""
