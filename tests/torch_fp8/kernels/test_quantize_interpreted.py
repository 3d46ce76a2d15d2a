"""Indexing, masks, strides, scales and edges of the cast kernels, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GRANULARITIES = ("tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32")
INPUTS = (
    "one element",
    "odd shape",
    "one tile",
    "tails",
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
    "-inf",
    "nan",
)
CASES = [
    *(
        f"{granularity}, {name}"
        for granularity in (*GRANULARITIES, "known scale")
        for name in INPUTS
    ),
    "rowwise, longer than the registers hold",
    "division",
]


@pytest.fixture(scope="module")
def differences():
    """Case -> what differed from the reference."""
    script = Path(__file__).with_name("interpreted_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_equals_reference_bit_for_bit(differences, case):
    assert differences[case] == []


def test_every_case_is_listed(differences):
    assert sorted(differences) == sorted(CASES)
