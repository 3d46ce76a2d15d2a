"""The kernels of experts without a GPU: indexing, masks, groups, rounding."""

import pytest

pytestmark = pytest.mark.long

GATES = ("plain", "plain, bias", "interleaved with limits, bias", "limits")
CASES = [
    *("rows", "rows transposed", "tokens transposed"),
    *(f"gate, {form}" for form in GATES),
]


@pytest.fixture(scope="module")
def differences(interpreted):
    """Case -> what differed from the reference."""
    return interpreted("interpreted_expert_cases.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_equals_reference_bit_for_bit(differences, case):
    assert differences[case] == []


def test_every_case_is_listed(differences):
    assert sorted(differences) == sorted(CASES)
