"""The benchmark of levels keeps finished rows and compares to BF16 of the same seed."""

import json
import statistics
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.evidence import optimizer_loss as bench
from benchmarks.evidence import pretraining
from benchmarks.rows import RESULTS
from torch_fp8 import FP8Config


@pytest.fixture
def runs(monkeypatch):
    """Stands for the scripts: notes (script, level, seed) and ends with a loss made of them."""
    started = []

    def run(command, env=None, **_):
        if command[0] == "git":
            return subprocess.CompletedProcess(command, 0, stdout="abc1234\n")
        script = command[1] if command[1] != "-m" else command[2]
        if script == "benchmarks.evidence.pretraining":
            level = command[command.index("--level") + 1] if "--level" in command else "bf16-mixed"
        else:
            level = json.loads(env.get("TORCH_FP8_CONFIG", '{"opt_level": "bf16-mixed"}'))
            level = level["opt_level"]
            precision = command[command.index("--precision") + 1]
            assert (precision == "bf16-mixed") == (level == "bf16-mixed")
        seed = int(command[command.index("--seed") + 1])
        started.append((script, level, seed))
        loss = 4.0 + seed + 0.04 * (level != "bf16-mixed")
        result = {"final_train_loss": 3.0, "final_eval_loss": loss, "seconds": 1.0}
        result |= {"steps": 80, "bytes_per_parameter": 7.0612}
        (Path(command[command.index("--output") + 1]) / "result.json").write_text(
            json.dumps(result)
        )
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    return started


def _start(monkeypatch, path, *arguments):
    monkeypatch.setattr("sys.argv", ["optimizer_loss", "--csv", str(path), *arguments])
    bench.main()


@pytest.mark.parametrize("long", [False, True], ids=["fine-tuning", "pretraining"])
def test_every_level_is_compared_to_bf16_of_its_seed(runs, monkeypatch, tmp_path, capsys, long):
    path = tmp_path / "results" / "levels.csv"
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"opt_level": "O2"}')  # of the user, not of a run
    _start(monkeypatch, path, "--seeds", "0", "1", *(["--pretraining"] if long else []))
    rows = bench.read_rows(path)
    run = "pretraining" if long else "fine-tuning"
    levels = "bf16-mixed", "O1", "O2", "O3"
    assert set(rows) == {(run, level, seed) for level in levels for seed in (0, 1)}
    row = rows[run, "O3", 1]
    assert float(row["bf16_eval_loss"]) == 5.0
    assert float(row["rel_diff"]) == pytest.approx(0.04 / 5.0)
    assert row["bytes_per_parameter"] == "7.06"
    assert "O3" in row["command"]
    assert row["command"].endswith("--seed 1")
    assert "+0.900%" in capsys.readouterr().out  # the mean of 1 % and 0.8 %


def test_finished_rows_are_not_run_again(runs, monkeypatch, tmp_path):
    path = tmp_path / "levels.csv"
    _start(monkeypatch, path, "--seeds", "0", "--levels", "O2")
    _start(monkeypatch, path, "--seeds", "0", "--levels", "O2", "O3")
    _start(monkeypatch, path, "--seeds", "0", "--levels", "O2", "--pretraining")
    script, long = "benchmarks/comparison/sft_lightning.py", "benchmarks.evidence.pretraining"
    fine_tuning = [(script, level, 0) for level in ("bf16-mixed", "O2", "O3")]
    assert runs == [*fine_tuning, (long, "bf16-mixed", 0), (long, "O2", 0)]


def test_perturbed_runs_are_of_the_pretraining(runs, monkeypatch, tmp_path):
    path, level = tmp_path / "levels.csv", "bf16-mixed, perturbed by 2e-6"
    _start(monkeypatch, path, "--seeds", "0", "--levels", level, "--pretraining")
    row = bench.read_rows(path)["pretraining", level, 0]
    assert "--perturbed 2 --seed 0" in row["command"]
    with pytest.raises(SystemExit):
        _start(monkeypatch, path, "--seeds", "0", "--levels", level)


def test_a_failed_run_says_why_and_leaves_no_row(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, stdout="the reason")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    path = tmp_path / "levels.csv"
    with pytest.raises(RuntimeError, match="the reason"):
        _start(monkeypatch, path, "--seeds", "0")
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("level", [None, "O1", "O2", "O3"])
def test_the_pretraining_learns_on_every_level(monkeypatch, level):
    """On a stream that repeats itself; bytes per parameter tell that the level was applied."""
    stream = torch.arange(64).repeat(40)
    monkeypatch.setattr(pretraining, "corpus", lambda: (stream, stream, 64))
    monkeypatch.setattr(pretraining, "LENGTH", 32)
    monkeypatch.setattr(pretraining, "EVAL_WINDOWS", 16)
    config = level and FP8Config(opt_level=level)
    result = pretraining.pretrain(config, seed=0, steps=12)
    assert result["final_eval_loss"] < 3.5  # chance: 4.16
    expected = {None: 16.0, "O1": 16.0, "O2": 7.07, "O3": 6.12}[level]
    assert result["bytes_per_parameter"] == pytest.approx(expected, abs=0.05)
    other = pretraining.pretrain(config, seed=0, steps=12, perturbed=1000)
    assert other["final_train_loss"] != result["final_train_loss"]


@pytest.mark.parametrize("level", bench.LEVELS)
def test_recorded_fine_tunings_are_complete_and_within_the_band(level):
    rows = bench.read_rows(RESULTS / "optimizer_loss.csv")
    of_level = [
        row for (run, name, _), row in rows.items() if (run, name) == ("fine-tuning", level)
    ]
    assert sorted(int(row["seed"]) for row in of_level) == [0, 1, 2]
    assert abs(statistics.mean(float(row["rel_diff"]) for row in of_level)) < bench.BAND


def differences_to_bf16(level, loss):
    """Of recorded pretrainings to BF16's of the same seed: the mean of all that are recorded.

    A seed ends elsewhere on another kind of CPU, as it does where a weight differs by a millionth.
    """
    rows = bench.read_rows(RESULTS / "optimizer_loss.csv")
    of_bf16 = {}
    for (run, name, seed), row in rows.items():
        if run == "pretraining" and name.startswith(bench.BASELINE):
            of_bf16.setdefault(seed, []).append(float(row[loss]))
    return [
        float(row[loss]) / statistics.mean(of_bf16[seed]) - 1
        for (run, name, seed), row in rows.items()
        if (run, name) == ("pretraining", level)
    ]


@pytest.mark.parametrize("level", [f"{name}, norms and MLPs in BF16" for name in bench.LEVELS])
@pytest.mark.parametrize("loss", ["final_train_loss", "final_eval_loss"])
def test_recorded_pretrainings_are_within_the_spread_of_bf16_itself(level, loss):
    differences = differences_to_bf16(level, loss)
    assert len(differences) == 2
    # The mean of two runs has a standard deviation of 0.26 %: two of these upwards.
    assert statistics.mean(differences) < bench.BAND


@pytest.mark.parametrize(("level", "runs"), [("O1", 10), ("O2", 10), ("O3", 2)])
@pytest.mark.parametrize("loss", ["final_train_loss", "final_eval_loss"])
def test_recorded_pretrainings_with_norms_and_mlps_in_fp8_are_too(level, runs, loss):
    differences = differences_to_bf16(level, loss)
    assert len(differences) == runs
    assert statistics.mean(differences) < bench.BAND
