"""Averages over ranks by how gradients travel: what is recorded, and a part of it measured."""

import csv

import pytest

from benchmarks.evidence import wire as bench
from benchmarks.rows import RESULTS

RANKS = pytest.mark.parametrize("ranks", bench.RANKS)
INPUTS = pytest.mark.parametrize("input_name", bench.INPUTS)


@pytest.fixture(scope="module")
def recorded():
    with (RESULTS / "wire.csv").open() as file:
        return {(r["method"], int(r["ranks"]), r["input"]): r for r in csv.DictReader(file)}


@RANKS
@INPUTS
@pytest.mark.parametrize("method", ["fp8", "fp8, O3"])
def test_recorded_averages_keep_28_3_db_and_every_row_26_5(recorded, method, ranks, input_name):
    row = recorded[method, ranks, input_name]
    assert float(row["sqnr_db"]) >= 28.3
    assert float(row["worst_row_sqnr_db"]) >= 26.5
    assert float(row["of_float32"]) <= 0.27
    assert float(row["of_bf16"]) <= 0.53


@RANKS
@INPUTS
@pytest.mark.parametrize("name", ["sqnr_db", "worst_row_sqnr_db"])
def test_a_sum_in_fp8_is_worse_and_bf16_better(recorded, ranks, input_name, name):
    ours, bf16, fp8_sum, fp8_lm = (
        float(recorded[method, ranks, input_name][name])
        for method in ("fp8", "bf16", "fp8 sum", "fp8-lm")
    )
    assert fp8_sum < ours - 5
    assert fp8_lm < ours - 5
    assert bf16 > ours


@pytest.mark.slow
def test_two_ranks_repeat_what_is_recorded(recorded, tmp_path, monkeypatch):
    path = tmp_path / "wire.csv"
    monkeypatch.setattr("sys.argv", ["wire", "--ranks", "2", "--csv", str(path)])
    bench.main()
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(bench.METHODS) * len(bench.INPUTS)
    for row in rows:
        same = recorded[row["method"], 2, row["input"]]
        assert {row[name] for name in bench.COLUMNS} == {same[name] for name in bench.COLUMNS}
