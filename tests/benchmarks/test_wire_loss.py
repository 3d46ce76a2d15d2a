"""The benchmark of losses on two ranks compares to BF16 on as many, and to one rank."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.evidence import optimizer_loss
from benchmarks.evidence import wire_loss as bench
from benchmarks.rows import RESULTS


@pytest.fixture
def runs(monkeypatch):
    """Stands for the script: notes each run's configuration, and ends with a loss made of it."""
    started = []

    def run(command, env=None, **_):
        if command[0] == "git":
            return subprocess.CompletedProcess(command, 0, stdout="abc1234\n")
        assert env["PL_TRAINER_DEVICES"] == "2"
        assert command[command.index("--accumulate") + 1] == "1"
        config = env.get("TORCH_FP8_CONFIG")
        precision = command[command.index("--precision") + 1]
        assert (precision == "bf16-mixed") == (config is None)
        started.append(json.loads(config) if config else None)
        result = {"final_train_loss": 3.0, "final_eval_loss": 5.0 + 0.05 * bool(config)}
        result |= {"steps": 80, "bytes_per_parameter": 7.06, "seconds": 1.0}
        output = Path(command[command.index("--output") + 1])
        (output / "result.json").write_text(json.dumps(result))
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(bench.os, "environ", dict(os.environ))
    return started


def test_each_run_is_compared_to_bf16_on_two_ranks_and_to_one_rank(runs, monkeypatch, tmp_path):
    path = tmp_path / "wire_loss.csv"
    for _ in range(2):  # the second time there is nothing to run
        monkeypatch.setattr("sys.argv", ["wire_loss", "--csv", str(path), "--runs", "O3"])
        bench.main()
    assert runs == [None, {"opt_level": "O3"}]
    row = bench.read_rows(path)["O3", 0]
    assert row["ranks"] == "2"
    assert float(row["rel_diff"]) == pytest.approx(0.01)
    alone = optimizer_loss.read_rows(RESULTS / "optimizer_loss.csv")
    alone = float(alone["fine-tuning", "O3", 0]["final_eval_loss"])
    assert float(row["one_rank_eval_loss"]) == alone
    assert float(row["rel_diff_to_one_rank"]) == pytest.approx(5.05 / alone - 1, abs=1e-6)
    assert row["command"].startswith("PL_TRAINER_DEVICES=2 TORCH_FP8_CONFIG=")


def test_recorded_runs_are_within_the_band():
    rows = bench.read_rows(RESULTS / "wire_loss.csv")
    assert {("O2", 0), ("O3", 0)} <= rows.keys()
    for row in rows.values():
        assert abs(float(row["rel_diff"])) < optimizer_loss.BAND
        assert abs(float(row["rel_diff_to_one_rank"])) < optimizer_loss.BAND
