"""Selective checkpoints side by side: products again, bytes, and the rows of the results."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import checkpoint_policies as policies
from benchmarks.measurement import RESULTS, read_rows
from torch_fp8 import FP8Config

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("none", *policies.CONTEXTS)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = dict.fromkeys(policies.SIZES, 0) | policies.SIZES
    small = {name: size // 8 if "size" in name else size for name, size in sizes.items()}
    monkeypatch.setattr(policies, "SIZES", small)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_products_again_and_bytes_in_eager_mode(recipe):
    config = FP8Config(recipe=recipe)
    found = {kind: policies.eager(kind, config) for kind in KINDS}
    again = {kind: gemms for kind, (gemms, _) in found.items()}
    assert again == {"none": 0, "whole": 7, "torch_fp8": 3, "torch": 7, "torch, products": 0}
    kept = {kind: size for kind, (_, size) in found.items()}
    assert kept["whole"] < kept["torch_fp8"] < kept["none"] < kept["torch"]
    assert kept["torch"] < kept["torch, products"]


@pytest.mark.long
@pytest.mark.parametrize("kind", policies.CONTEXTS)
def test_products_again_in_a_compiled_graph(kind):
    gemms, size = policies.compiled(kind, FP8Config(recipe="tensorwise"))
    assert gemms == (6 if kind == "whole" else 3)  # the last one is not needed
    assert size > 0


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="Triton's launchers need cc")
def test_host_time_of_each_kind(forked_python):
    done = subprocess.run(
        [forked_python, "-m", "benchmarks.checkpoint_host_time", "2"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    times = json.loads(done.stdout.splitlines()[-1])
    assert set(times) == set(policies.RECIPES)
    for by_kind in times.values():
        assert set(by_kind) == set(KINDS)
        assert by_kind["none"] < min(us for kind, us in by_kind.items() if kind != "none")


def test_every_row_is_there_and_none_was_refused():
    rows = read_rows(RESULTS / "checkpoint_policies.csv")
    found = [(row["checkpoint"], row["recipe"], row["mode"]) for row in rows]
    modes = dict.fromkeys(policies.CONTEXTS, ("eager", "compiled")) | {"none": ("eager",)}
    expected = {(k, r, mode) for r in policies.RECIPES for k in KINDS for mode in modes[k]}
    assert set(found) == expected
    assert len(found) == len(expected)
    assert not any(row["error"] for row in rows)
