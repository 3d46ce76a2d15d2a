"""Bytes and launches for a number of tokens that is no multiple of 16: those of the next one."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json
from benchmarks.token_bytes import row
print(json.dumps([row(recipe, "linear with a bias", tokens)
                  for recipe in ("tensorwise", "blockwise") for tokens in (128, 127)]))
"""


def _assert_alike(whole, one_less):
    """The same launches, and within 1 % the same bytes, padded tokens included."""
    for column in ("kernels", "torch_operators", "gemms", "launched"):
        assert whole[column] == one_less[column], (whole["recipe"], whole["model"], column)
    moved = [float(row["bytes_per_token"]) * int(row["tokens"]) for row in (whole, one_less)]
    assert moved[1] == pytest.approx(moved[0], rel=0.01), (whole["recipe"], whole["model"])


def _pairs(rows):
    """Rows of one recipe and model, which stand together."""
    groups = itertools.groupby(rows, lambda row: (row["recipe"], row["model"]))
    return [list(pair) for _, pair in groups]


def test_a_layer_moves_and_launches_the_same():
    """A process of its own: the interpreter is chosen when Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    pairs = _pairs(json.loads(done.stdout.splitlines()[-1]))
    assert len(pairs) == 2
    for whole, one_less in pairs:
        _assert_alike(whole, one_less)
        assert whole["torch_operators"] == 0 or whole["recipe"] == "blockwise"
