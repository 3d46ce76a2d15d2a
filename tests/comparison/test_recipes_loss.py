"""The benchmark of recipes keeps finished rows and compares to the same seed."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks/evidence/recipes_loss.py"


@pytest.fixture
def recipes_loss():
    spec = importlib.util.spec_from_file_location("recipes_loss", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def runs(recipes_loss, monkeypatch):
    """Stands for the training script: notes (recipe, seed) and ends with a loss made of them."""
    started = []

    def run(command, env=None, **_):
        if command[0] == "git":
            return subprocess.CompletedProcess(command, 0, stdout="abc1234\n")
        config = json.loads(env.get("TORCH_FP8_CONFIG", '{"recipe": "bf16-mixed"}'))
        seed = int(command[command.index("--seed") + 1])
        precision = command[command.index("--precision") + 1]
        assert command[command.index("--pretraining-steps") + 1] == "1000"  # not as time allows
        assert (precision == "bf16-mixed") == (config["recipe"] == "bf16-mixed")
        started.append((config["recipe"], seed))
        loss = 4.0 + seed + 0.04 * (precision == "fp8-mixed")
        result = {"final_train_loss": 3.0, "final_eval_loss": loss, "seconds": 1.0}
        (Path(command[-1]) / "result.json").write_text(json.dumps(result))
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(recipes_loss.subprocess, "run", run)
    return started


def start(recipes_loss, monkeypatch, path, *arguments):
    monkeypatch.setattr("sys.argv", ["recipes_loss.py", "--csv", str(path), *arguments])
    recipes_loss.main()


def test_every_recipe_is_compared_to_bf16_of_its_seed(
    recipes_loss, runs, monkeypatch, tmp_path, capsys
):
    path = tmp_path / "results" / "recipes.csv"
    start(recipes_loss, monkeypatch, path, "--seeds", "0", "1")
    rows = recipes_loss.read_rows(path)
    assert set(rows) == {(r, s) for r in ("bf16-mixed", *recipes_loss.RECIPES) for s in (0, 1)}
    assert float(rows["mxfp8", 1]["bf16_eval_loss"]) == 5.0
    assert float(rows["mxfp8", 1]["rel_diff"]) == pytest.approx(0.04 / 5.0)
    assert rows["mxfp8", 1]["command"].startswith('TORCH_FP8_CONFIG=\'{"recipe": "mxfp8"}\' python')
    assert "+0.900%" in capsys.readouterr().out  # the mean of 1 % and 0.8 %


def test_finished_rows_are_not_run_again(recipes_loss, runs, monkeypatch, tmp_path):
    path = tmp_path / "recipes.csv"
    start(recipes_loss, monkeypatch, path, "--seeds", "0", "--recipes", "rowwise")
    start(recipes_loss, monkeypatch, path, "--seeds", "0", "--recipes", "rowwise", "mxfp8")
    assert runs == [("bf16-mixed", 0), ("rowwise", 0), ("mxfp8", 0)]


def test_a_failed_run_says_why_and_leaves_no_row(recipes_loss, monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, stdout="the reason")
    monkeypatch.setattr(recipes_loss.subprocess, "run", lambda *_, **__: failed)
    path = tmp_path / "recipes.csv"
    with pytest.raises(RuntimeError, match="the reason"):
        start(recipes_loss, monkeypatch, path, "--seeds", "0")
    assert not path.exists()
