"""The kernels of 8-bit gradients without a GPU: indexing, masks, random words."""

import itertools

import pytest

pytestmark = pytest.mark.long

SHAPES = (
    "flat, several programs",
    "a group and a half",
    "odd",
    "one row",
    "short",
    "long rows",
    "no rows",
    "no columns",
)
CASES = [
    *(f"{shape}, {dtype}" for shape, dtype in itertools.product(SHAPES, ("bfloat16", "float32"))),
    "address of an odd element",
    "just rounded up",
]


@pytest.fixture(scope="module")
def differences(interpreted):
    """Case -> what differed from the reference."""
    return interpreted("interpreted_gradient_cases.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_equals_reference_bit_for_bit(differences, case):
    assert differences[case] == []


def test_every_case_is_listed(differences):
    assert sorted(differences) == sorted(CASES)
