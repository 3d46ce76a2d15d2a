"""Graphs of torch.compile for a card, in which an operator is its kernels, emulated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCTS = {"torch_fp8::scaled_mm", "torch_fp8::scaled_grouped_mm"}
CASES = ["llama tensorwise", "llama delayed", "llama rowwise", "llama blockwise"]
CASES += ["experts tensorwise", "experts blockwise"]
IN_CI = [pytest.param(CASES[0], marks=pytest.mark.long)]


@pytest.mark.parametrize(
    "case", IN_CI + [pytest.param(c, marks=pytest.mark.slow) for c in CASES[1:]]
)
def test_kernels_in_a_graph_give_the_bits_of_whole_operators(case):
    command = [sys.executable, "-m", "tests.emulator.graphs", case]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)[case]
    assert result["unequal"] == []
    assert len(result["whole operators"]) > 5
    assert result["operators"].keys() <= PRODUCTS
    if "llama" in case:
        assert result["same launches"]
