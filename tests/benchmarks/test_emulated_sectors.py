"""How often a warp asks for a sector of 32 bytes: once, but for the kernels that are named."""

import pytest

from benchmarks.evidence.emulated_sectors import cases
from tests.emulator.counts import Counts
from tests.emulator.driver import emulated

pytestmark = pytest.mark.long

CASES = cases()
LARGEST = {
    # Scales are stored by threads that are a row apart: 4 bytes of each sector.
    "1x32": 1.04,
    # Bytes of states take 16 of a thread, and so do its weights.
    "AdamW": 1.34,
    "AdamW with the payload": 1.67,
    "statistics of RMSNorm": 1.32,
    "RMSNorm to 1x128": 1.55,
    "RMSNorm backward": 1.18,
    "SwiGLU to 1x128": 1.50,
    "SwiGLU backward to 1x128": 1.36,
    # Ends of messages lie within sectors.
    "messages": 1.06,
}
"""Sectors over as many as bytes fill, where these are not all."""


@pytest.mark.parametrize("name", CASES)
def test_sectors_of_a_kernel(name):
    with emulated(watch=lambda: [Counts()]) as emulation:
        CASES[name]()
    for launched in emulation.launches:
        (counts,) = launched.watch
        assert counts.sectors <= LARGEST.get(name, 1.01) * counts.least_sectors, launched.name
