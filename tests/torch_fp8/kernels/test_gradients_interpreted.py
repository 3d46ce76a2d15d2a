"""The kernels of 8-bit gradients without a GPU: indexing, masks, random words, complements."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
]


@pytest.fixture(scope="module")
def differences():
    """Case -> what differed from the reference."""
    script = Path(__file__).with_name("interpreted_gradient_cases.py")
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
