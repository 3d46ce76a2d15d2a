"""The kernels of messages without a GPU: indexing, masks, rounding, random words, sums."""

import itertools

import pytest

pytestmark = pytest.mark.long

NAMES = (
    "several programs",
    "end within a program",
    "end within a group",
    "odd end",
    "an empty message",
    "one group",
    "nothing",
)
CASES = [
    *(f"{name}, {dtype}" for name, dtype in itertools.product(NAMES, ("bfloat16", "float32"))),
    "plain values",
    "address of an odd element",
    "just rounded up",
]


@pytest.fixture(scope="module")
def differences(interpreted):
    """Case -> what differed from the reference."""
    return interpreted("interpreted_wire_cases.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_equals_reference_bit_for_bit(differences, case):
    assert differences[case] == []


def test_every_case_is_listed(differences):
    assert sorted(differences) == sorted(CASES)
