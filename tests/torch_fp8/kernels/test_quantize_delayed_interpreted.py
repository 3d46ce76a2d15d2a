"""Casts with delayed scaling against their references, without a GPU."""

import pytest

pytestmark = pytest.mark.long


INPUTS = (
    "one element",
    "odd shape",
    "rows to pad",
    "columns to pad",
    "one tile",
    "few rows",
    "tails",
    "transposed",
    "sliced",
    "no unit stride",
    "expanded",
    "zeros",
    "denormal",
    "tiny",
    "huge",
    "inf",
    "nan",
    "nan, rows to pad",
)
FEW = ("odd shape", "zeros", "nan", "inf")
HISTORIES = ("one", "most recent", "default", "long")
CASES = [
    *(f"short, {name}" for name in INPUTS),
    *(f"{history}, {name}" for history in HISTORIES for name in FEW),
]


@pytest.fixture(scope="module")
def differences(interpreted):
    """Case -> what differed from the reference."""
    return interpreted("interpreted_delayed_cases.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_equals_reference_bit_for_bit(differences, case):
    assert differences[case] == []


def test_every_case_is_listed(differences):
    assert sorted(differences) == sorted(CASES)
