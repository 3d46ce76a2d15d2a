"""Bytes and launches for a number of tokens that is no multiple of 16: those of the next one."""

import csv
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
                  for recipe in ("tensorwise", "blockwise") for tokens in (128, 127, 256)]))
"""
DELAYED_PRODUCERS = ("delayed", "norm and gated MLP")
"""The one case whose fused kernels do not run with odd rows: those that take amaxes for later."""


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
    for (recipe, model), (whole, one_less) in recorded.items():
        assert (whole["tokens"], one_less["tokens"]) == ("4096", "4095")
        if (recipe, model) == DELAYED_PRODUCERS:
            assert int(one_less["kernels"]) > int(whole["kernels"])
            assert _moved(one_less) < 1.5 * _moved(whole)
        elif recipe == "mxfp8":  # its reference pads what wgrad takes, in torch's operators
            fewer = one_less["launched"].replace(" aten::constant_pad_nd", "")
            assert whole["launched"].replace(" aten::constant_pad_nd", "") == fewer
            assert _moved(one_less) == pytest.approx(_moved(whole), rel=0.01)
        else:
            _assert_alike(whole, one_less)


@pytest.mark.long
def test_a_layer_moves_and_launches_what_is_recorded(recorded):
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
    rows = json.loads(done.stdout.splitlines()[-1])
    for recipe in ("tensorwise", "blockwise"):
        few, one_less, more = (row for row in rows if row["recipe"] == recipe)
        _assert_alike(few, one_less)
        assert few["torch_operators"] == 0 or recipe == "blockwise"
        whole, _ = recorded[recipe, "linear with a bias"]
        assert few["launched"] == whole["launched"]
        # Weights have the same bytes for any number of tokens, the rest grows with them.
        expected = _moved(few) + (_moved(more) - _moved(few)) * (4096 - 128) / 128
        assert _moved(whole) == pytest.approx(expected, rel=0.001)
