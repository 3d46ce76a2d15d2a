"""A warp asks for each sector of 32 bytes once: no two accesses of a thread share one."""

import pytest

from benchmarks.emulated_sectors import cases
from tests.emulator.counts import Counts
from tests.emulator.driver import emulated

pytestmark = pytest.mark.long

CASES = cases()
LARGEST = {
    # Scales are stored by threads that are a row apart: 4 bytes of each sector.
    "1x32": 1.04,
    # Bytes of states take 16 of a thread, and so do its weights: what bounds a step is the
    # number of its instructions, which 8 to a thread would raise.
    "AdamW": 1.34,
    "AdamW with both payloads": 1.76,
    # Scales and rstd of rows, which neighbours load or store a row apart.
    "statistics of RMSNorm": 1.04,
    "RMSNorm to 1x128": 1.12,
    "RMSNorm backward": 1.02,
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
