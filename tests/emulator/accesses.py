"""What the two memories share: which threads access, and values between registers and bytes."""

from functools import cached_property
from typing import Any

import numpy as np

from tests.emulator.threads import Threads

Values = Any
TYPES = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("V16"),
}


class Access:
    """What threads access with one instruction, a place for each of them.

    Args:
        line: line of the PTX.
        threads: the threads that run the instruction.
        address: for each thread, or of all.
        guard: which of them access; None: all do.
        width: bytes of each access.
        write: whether they are written.
        atomic: whether it is an atomic operation.

    Attributes:
        places: which of these threads access, by their places; None: all.
        addresses: for each access, int64.
    """

    def __init__(
        self,
        line: int,
        threads: Threads,
        address: Values,
        guard: Values,
        width: int,
        write: bool,
        atomic: bool = False,
    ) -> None:
        self.line, self.threads, self.width = line, threads, width
        self.write, self.atomic = write, atomic
        self.places = _chosen(guard, threads.count)
        address = address.astype(np.int64)
        if np.ndim(address) == 0:
            count = threads.count if self.places is None else len(self.places)
            self.addresses = np.full(count, address)
        else:
            self.addresses = self._among(address)

    def __len__(self) -> int:
        return len(self.addresses)

    @cached_property
    def numbers(self) -> np.ndarray:
        return self._among(self.threads.numbers)

    @cached_property
    def program(self) -> np.ndarray:
        return self._among(self.threads.program)

    @cached_property
    def warp(self) -> np.ndarray:
        return self._among(self.threads.warp)

    @property
    def bytes(self) -> np.ndarray:
        return self.addresses[:, None] + np.arange(self.width)

    def misaligned(self) -> int | None:
        """Return an address that is no multiple of the width; None: all are."""
        if self.width == 1 or not np.bitwise_or.reduce(self.addresses) & (self.width - 1):
            return None
        return int(self.addresses[np.flatnonzero(self.addresses % self.width)[0]])

    def _among(self, values: np.ndarray) -> np.ndarray:
        return values if self.places is None else values[self.places]


def _chosen(guard: Values, count: int) -> np.ndarray | None:
    if guard is None or (np.ndim(guard) == 0 and guard):
        return None
    if np.ndim(guard) == 0:
        return np.zeros(0, np.int64)
    places = np.flatnonzero(guard)
    return None if len(places) == count else places


def unpacked(values: np.ndarray, bits: int, vector: int, access: Access) -> np.ndarray:
    """Return what was loaded as (vector, threads), or (threads,) of one value.

    Args:
        values: one element for each access, of its width.
        bits: size of each register.
        vector: number of registers.
        access: the load; threads that take no part in it get zeros.
    """
    dtype = TYPES[bits // 8]
    parts = values.view(dtype).reshape(len(values), vector).T
    if access.places is None:
        registers = np.ascontiguousarray(parts)
    else:
        registers = np.zeros((vector, access.threads.count), dtype)
        registers[:, access.places] = parts
    return registers if vector > 1 else registers[0]


def packed(values: tuple[Values, ...], bits: int, access: Access) -> np.ndarray:
    dtype, places = TYPES[bits // 8], access.places
    elements = np.empty((len(access), len(values)), dtype)
    for i, value in enumerate(values):
        value = value.astype(dtype)
        elements[:, i] = value if places is None or np.ndim(value) == 0 else value[places]
    return elements.view(TYPES[bits // 8 * len(values)])[:, 0]
