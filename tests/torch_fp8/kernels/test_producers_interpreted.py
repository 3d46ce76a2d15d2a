"""The kernels of RMSNorm and SwiGLU without a GPU: indexing, masks, strides, scales, edges."""

import itertools

import pytest

pytestmark = pytest.mark.long


INPUTS = (
    "one tile",
    "tails",
    "tails, float32",
    "float16",
    "odd",
    "rows to pad",
    "129 x 127",
    "one row",
    "few rows",
    "one column",
    "one element",
    "no rows",
    "no columns",
    "transposed",
    "sliced",
    "no unit stride",
    "zeros",
    "inf",
    "nan",
)
KINDS = (
    *("norm", "norm casts", "norm once", "norm backward"),
    *("swiglu", "swiglu backward", "gate_up backward"),
)
SMOOTHED = ("tails", "odd", "no rows", "sliced", "inf", "nan")
CASES = [
    *(f"smooth, {name}" for name in SMOOTHED),
    *(f"{kind}, {name}" for kind, name in itertools.product(KINDS, INPUTS)),
    "norm without offset",
    "norm casts without offset",
    "norm once, two launches",
    "swiglu, not smooth",
    "swiglu backward, not smooth",
    "gate_up backward, whole tiles",
    "gate_up backward, up first",
    *(f"norm, {cols} columns" for cols in (4112, 16500)),
    *(f"norm backward, {shape}" for shape in ("9 x 8208", "1060 x 16", "5 x 2100")),
]


@pytest.fixture(scope="module")
def differences(interpreted):
    """Case -> what differed from the reference."""
    return interpreted("interpreted_producer_cases.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_equals_reference(differences, case):
    assert differences[case] == []


def test_every_case_is_listed(differences):
    assert sorted(differences) == sorted(CASES)
