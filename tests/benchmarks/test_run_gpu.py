import csv
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_tests, run_gpu
from benchmarks.rows import read_rows
from tests.processes import ran

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("linear", "block", "step", "memory", "gemm", "optimizer")


@pytest.fixture(scope="module")
def results(tmp_path_factory, forked_hosts):
    directory = tmp_path_factory.mktemp("results")
    options = ["--toy", "--seconds", "9000", "--results", directory]
    ran(forked_hosts, "-m", "benchmarks.run_gpu", *options, cwd=ROOT, HF_HUB_OFFLINE="1")
    return directory


def rows(directory, name):
    with (directory / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_step_runs_fp8_linears_under_fp8_mixed_only(results):
    measured = {(row["host"], row["variant"]): row for row in rows(results, "step.csv")}
    for host in ("lightning", "accelerate"):
        bf16, fp8 = measured[host, "bf16-mixed"], measured[host, "fp8-mixed"]
        assert bf16["fp8_linears"] == "0"
        assert fp8["fp8_linears"] == "14"
        assert (bf16["recipe"], fp8["recipe"]) == ("", "tensorwise")
        assert float(bf16["loss"]) == pytest.approx(float(fp8["loss"]), rel=0.01)
        assert abs(float(fp8["loss_difference"])) < 0.01
        for row in (bf16, fp8):
            phases = [float(row[f"{p}_ms"]) for p in ("forward", "backward", "optimizer")]
            assert min(phases) > 0
            assert sum(phases) < 2 * float(row["median_ms"])
    assert all(row["median_ms"] or row["note"] for row in measured.values())


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*(f"{part}.csv" for part in (*PARTS, "loss", "moe", "step_kernels")), "gpu_run.csv"]
)
def test_rows_say_where_they_come_from(results, name):
    found = rows(results, name)
    assert found
    for row in found:
        assert row["torch"] == torch.__version__
        for column in ("gpu", "driver", "triton", "commit", "date", "command"):
            assert row[column], column
        assert row["command"].startswith("python -m benchmarks.")


@pytest.mark.long
def test_every_gpu_test_has_a_row_before_it_runs(results):
    """Every function comes before the second case of any, kernels before layers before hosts."""
    passed = {r["test"] for r in read_rows(gpu_tests.COMMITTED) if r["result"] == "passed"}
    every = [row["test"] for row in rows(results, "tests.csv")]
    assert {row["result"] for row in rows(results, "tests.csv")} == {"not run"}
    new = [test not in passed for test in every]
    assert new == sorted(new, reverse=True)
    tests = [test.partition("[")[0] for test in every[: sum(new)]]
    functions = list(dict.fromkeys(tests))
    assert tests[: len(functions)] == functions
    files = list(dict.fromkeys(test.partition("::")[0] for test in functions))
    assert files[0].endswith("test_quantize_gpu.py")
    assert files.index("tests/torch_fp8/test_cuda.py") < files.index(
        "tests/accelerate_fp8/test_trl_frozen.py"
    )
    ran = {row["part"]: row["result"] for row in rows(results, "gpu_run.csv")}
    assert list(ran) == list(run_gpu.PARTS)
    assert ran["tests"] == f"done, {len(every)} not run"
    assert "not run no card" in " ".join((results / "self_test.txt").read_text().split())


def test_a_self_test_that_fails_stops_the_rest(tmp_path, monkeypatch, capsys):
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(run_gpu, "command_of", lambda name, results: failing)
    parts = ["--parts", "self-test", "linear", "gemm"]
    monkeypatch.setattr(sys, "argv", ["run_gpu", "--toy", "--results", str(tmp_path), *parts])
    with pytest.raises(SystemExit) as ended:
        run_gpu.main()
    assert ended.value.code == 1
    (row,) = rows(tmp_path, "gpu_run.csv")
    assert (row["part"], row["result"]) == ("self-test", "exit status 3")
    out = capsys.readouterr().out
    assert "the self-test fails" in out
    assert "not run: linear, gemm; python -m benchmarks.run_gpu --parts linear gemm" in out


def test_the_files_with_gpu_tests_are_all_that_is_collected():
    """The others need packages that a machine with a card may lack: an error when collecting."""
    files = {Path(path).relative_to(ROOT).as_posix() for path in run_gpu.gpu_tests("tests")}
    assert "tests/torch_fp8/test_cuda.py" in files
    assert "tests/torch_fp8/conversion/test_autotune.py" in files
    assert "tests/torch_fp8/nn/test_linear.py" not in files
    for path in (ROOT / "tests").rglob("*.py"):
        if "pytest.mark.gpu" in path.read_text():
            assert path.relative_to(ROOT).as_posix() in files | {"tests/benchmarks/test_run_gpu.py"}
