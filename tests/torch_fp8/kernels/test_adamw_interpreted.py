"""The optimizer's kernels without a GPU: indexing, masks, tables, codec, random words, rounding."""

import itertools

import pytest

pytestmark = pytest.mark.long


WEIGHTS = ("bf16 with 8 bits", "bf16 alone", "fp32")
GRADS = ("bf16", "fp32", "8-bit")
CASES = [
    *(f"{weight}, gradient {grad}" for weight, grad in itertools.product(WEIGHTS, GRADS)),
    "coupled weight decay",
    "maximize",
    "multiplier of the learning rate",
    "shards",
    "address of an odd element",
    "three steps",
    "amax",
    *(
        f"payload {granularity}{transposed}"
        for granularity in ("tensorwise", "block_128x128")
        for transposed in ("", ", transposed")
    ),
    "payload of a weight that doubles",
    "tiny",
    "huge",
    "zeros",
    "Inf and NaN",
    "g^2 overflows",
    "update RMS, decoupled",
    "update RMS, coupled",
    *(
        f"{what} {name}"
        for name in ("e4m3", "tapered_unsigned", "tapered")
        for what in ("encode", "decode")
    ),
    "square root",
    "quotient",
    "reciprocal",
]


@pytest.fixture(scope="module")
def differences(interpreted):
    """Case -> what differed from the reference."""
    return interpreted("interpreted_adamw_cases.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_equals_reference_bit_for_bit(differences, case):
    assert differences[case] == []


def test_every_case_is_listed(differences):
    assert sorted(differences) == sorted(CASES)
