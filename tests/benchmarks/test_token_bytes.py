"""Bytes and launches for a number of tokens that is no multiple of 16: those of the next one."""

import csv
import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("tensorwise", "blockwise", "mxfp8")
FEW = 256
"""Tokens: more than one tile holds, as 4,096 are."""
SCRIPT = f"""
import json
from benchmarks.token_bytes import row
print(json.dumps([row(recipe, "linear with a bias", tokens)
                  for recipe in {RECIPES} for tokens in ({FEW}, {FEW - 1}, {2 * FEW})]))
"""


def _moved(row):
    return float(row["bytes_per_token"]) * int(row["tokens"])


def _assert_alike(whole, one_less):
    """The same launches, and within 1 % the same bytes, padded tokens included."""
    for column in ("kernels", "torch_operators", "gemms", "launched"):
        assert whole[column] == one_less[column], (whole["recipe"], whole["model"], column)
    assert _moved(one_less) == pytest.approx(_moved(whole), rel=0.01)


@pytest.fixture(scope="module")
def recorded():
    """Pairs of rows of the CSV, by recipe and model."""
    with (ROOT / "benchmarks" / "results" / "token_bytes.csv").open() as file:
        groups = itertools.groupby(csv.DictReader(file), lambda row: (row["recipe"], row["model"]))
        return {case: list(pair) for case, pair in groups}


def test_recorded_rows_are_alike(recorded):
    assert len(recorded) == 10
    for whole, one_less in recorded.values():
        assert (whole["tokens"], one_less["tokens"]) == ("4096", "4095")
        _assert_alike(whole, one_less)


@pytest.mark.long
def test_a_layer_moves_and_launches_what_is_recorded(recorded, forked_interpreter):
    """A process of its own: the interpreter is chosen when Triton is imported."""
    done = subprocess.run(
        [forked_interpreter, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    for recipe in RECIPES:
        few, one_less, more = (row for row in rows if row["recipe"] == recipe)
        _assert_alike(few, one_less)
        assert few["torch_operators"] == 0 or recipe != "tensorwise"
        whole, _ = recorded[recipe, "linear with a bias"]
        assert few["launched"] == whole["launched"]
        # Weights have the same bytes for any number of tokens, the rest grows with them.
        expected = _moved(few) + (_moved(more) - _moved(few)) * (4096 - FEW) / FEW
        assert _moved(whole) == pytest.approx(expected, rel=0.001)
