"""Indexing, masks, strides, scales and edges of the cast kernels, without a GPU."""

import pytest

pytestmark = pytest.mark.long


GRANULARITIES = ("tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32")
INPUTS = (
    "one element",
    "odd shape",
    "rows to pad",
    "columns to pad",
    "one tile",
    "tails",
    "few rows",
    "transposed",
    "sliced",
    "no unit stride",
    "expanded",
    "no rows",
    "no columns",
    "zeros",
    "denormal",
    "tiny",
    "huge",
    "inf",
    "nan",
    "nan, rows to pad",
)
CASES = [
    *(
        f"{granularity}, {name}"
        for granularity in (*GRANULARITIES, "known scale")
        for name in INPUTS
    ),
    *(
        f"sums, {granularity}, {name}"
        for granularity in ("tensorwise", "rowwise", "block_1x128", "block_1x32")
        for name in ("odd shape", "rows to pad", "one tile", "tails", "transposed", "nan")
    ),
    "rowwise, longer than the registers hold",
    "sums of many tiles",
    "division",
    "transpose",
]


@pytest.fixture(scope="module")
def differences(interpreted):
    """Case -> what differed from the reference."""
    return interpreted("interpreted_cases.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_equals_reference_bit_for_bit(differences, case):
    assert differences[case] == []


def test_every_case_is_listed(differences):
    assert sorted(differences) == sorted(CASES)
