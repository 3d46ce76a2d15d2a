"""What the two memories share: which threads access, and values between registers and bytes."""

from typing import Any

import numpy as np

Values = Any
TYPES = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("V16"),
}


def chosen(guard: Values, count: int) -> np.ndarray | None:
    """Return the places of the threads that access; None: all do."""
    if guard is None or (np.ndim(guard) == 0 and guard):
        return None
    if np.ndim(guard) == 0:
        return np.zeros(0, np.int64)
    places = np.flatnonzero(guard)
    return None if len(places) == count else places


def addresses_of(address: Values, places: np.ndarray | None, count: int) -> np.ndarray:
    """Return an address for each thread that accesses, int64."""
    address = address.astype(np.int64)
    if np.ndim(address) == 0:
        return np.full(count if places is None else len(places), address)
    return address if places is None else address[places]


def unpacked(
    values: np.ndarray, bits: int, vector: int, places: np.ndarray | None, count: int
) -> np.ndarray:
    """Return what was loaded as (vector, threads), or (threads,) of one value.

    Args:
        values: one element for each access, of its width.
        bits: of each register.
        vector: number of registers.
        places: the threads that accessed; others get zeros.
        count: number of threads.
    """
    dtype = TYPES[bits // 8]
    parts = values.view(dtype).reshape(len(values), vector).T
    if places is None:
        made = np.ascontiguousarray(parts)
    else:
        made = np.zeros((vector, count), dtype)
        made[:, places] = parts
    return made if vector > 1 else made[0]


def packed(
    values: tuple[Values, ...], bits: int, places: np.ndarray | None, count: int
) -> np.ndarray:
    """Return what is stored as one element for each access."""
    dtype = TYPES[bits // 8]
    size = count if places is None else len(places)
    made = np.empty((size, len(values)), dtype)
    for i, value in enumerate(values):
        value = value.astype(dtype)
        made[:, i] = value if places is None or np.ndim(value) == 0 else value[places]
    return made.view(TYPES[bits // 8 * len(values)])[:, 0]
