"""The one benchmark command, at toy size, on whatever machine this is."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_tests, run_gpu
from benchmarks.rows import OUTPUT, read_rows
from benchmarks.shapes import TOY_LLAMA, parameter_count

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
PEERS = ("torchao tensorwise", "torchao rowwise", "Transformer Engine delayed")
PARTS = ("linear", "block", "step", "memory", "gemm", "optimizer")


@pytest.fixture(scope="module")
def results(tmp_path_factory, forked_hosts):
    """Directory of the CSV files of one toy run."""
    directory = tmp_path_factory.mktemp("results")
    command = [
        forked_hosts,
        "-m",
        "benchmarks.run_gpu",
        "--toy",
        "--seconds",
        "9000",
        "--results",
        str(directory),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=920, env=ENVIRONMENT, check=False, cwd=ROOT
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return directory


def rows(directory, name):
    with (directory / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_every_recipe_has_a_time_for_every_linear_and_the_block(results, recipe):
    measured = [row for row in rows(results, "linear.csv") if row["variant"] == recipe]
    assert len(measured) == 10
    assert all(float(row["median_ms"]) > 0 for row in measured), measured
    *linears, block, together, chain = measured
    named = [row["linear"] for row in (block, together, chain)]
    assert named == ["block", "together", "chain"]
    total = sum(float(row["median_ms"]) for row in linears)
    assert float(block["median_ms"]) == pytest.approx(total, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("recipe", PEERS)
def test_a_peer_has_a_time_or_a_reason(results, recipe):
    measured = [row for row in rows(results, "linear.csv") if row["variant"] == recipe]
    assert len(measured) == 10
    assert all(row["median_ms"] or row["note"] for row in measured)


@pytest.mark.long
def test_errors_of_linears_are_those_of_their_formats(results):
    """GEMMs of E4M3 28.5 dB, of E5M2 gradients 24.6 dB, on normal operands."""
    measured = {
        row["variant"]: row for row in rows(results, "linear.csv") if row["linear"] == "up_proj"
    }
    found = {
        name: [float(measured[name][f"{what}_db"]) for what in ("output", "grad_input")]
        for name in ("bf16", "tensorwise", "blockwise")
    }
    assert found["tensorwise"] == pytest.approx([28.5, 24.6], abs=0.7)
    # A gradient of 176 columns has blocks of 128 and of 48, the smaller ones a bit finer.
    assert found["blockwise"] == pytest.approx([28.5, 28.5], abs=0.9)
    assert min(found["bf16"]) > 50


@pytest.mark.long
@pytest.mark.parametrize("name", ["linear.csv", "gemm.csv", "block.csv"])
def test_every_time_has_its_floor(results, name):
    """What a floor is of: tests/benchmarks/test_floors.py, with a clock that counts."""
    timed = [row for row in rows(results, name) if row["median_ms"]]
    assert timed
    for row in timed:
        floor, median = float(row["floor_ms"]), float(row["median_ms"])
        assert 0 < float(row.get("fused_floor_ms", floor)) <= floor
        digits = 5e-4 + 5e-5 / median  # of the share, and of a floor of few microseconds
        assert float(row["floor_share"]) == pytest.approx(floor / median, rel=0.02, abs=digits)


@pytest.mark.long
def test_the_fastest_of_each_shape_is_told(results):
    found = rows(results, "linear_shapes.csv")
    assert len(found) == 4
    for row in found:
        times = {n: float(row[f"{n}_ms"]) for n in ("bf16", *RECIPES)}
        assert row["fastest"] == min(times, key=times.get)
        assert float(row["speedup"]) >= 1


@pytest.mark.long
def test_gemms_have_errors_and_times(results):
    found = rows(results, "gemm.csv")
    timed = [row for row in found if row["gemm"] in ("fprop", "dgrad", "wgrad")]
    assert {row["gemm"] for row in timed} == {"fprop", "dgrad", "wgrad"}
    assert all(float(row["median_ms"]) > 0 for row in timed if not row["note"])
    # The CPU accumulates in float32; what BF16 loses is the rounding of its result.
    fp8 = [float(row["error"]) for row in found if row["error"] and row["variant"] != "bf16"]
    bf16 = [float(row["error"]) for row in found if row["error"] and row["variant"] == "bf16"]
    assert max(fp8) < 1e-6
    assert 1e-3 < min(bf16) <= max(bf16) < 3e-3


@pytest.mark.long
def test_a_block_keeps_fewer_bytes_in_fp8(results):
    found = {(row["variant"], row["mode"]): row for row in rows(results, "block.csv")}
    bf16, ours = found["bf16", "eager"], found["default", "eager"]
    assert bf16["saved_share"] == "1.0"
    assert float(ours["saved_bytes_per_token"]) < 0.6 * float(bf16["saved_bytes_per_token"])
    # Seven GEMMs of 24.6 dB and more, one after the other at worst; BF16 is at 40 and more.
    for name in ("output_db", "grad_input_db", "grad_weight_db"):
        assert 15 < float(ours[name]) < 30 < float(bf16[name]), name
    assert (bf16["recipe"], ours["recipe"]) == ("", "tensorwise")
    assert found["blockwise", "eager"]["recipe"] == "blockwise"
    assert any(row["kernel"] == "all" for row in rows(results, "block_kernels.csv"))


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
def test_memory_by_category_falls_with_the_level(results):
    found = {
        row["variant"]: row
        for row in rows(results, "memory.csv")
        if row["checkpointing"] == "False"
    }
    assert set(found) == {"bf16-mixed", "O1", "O2", "O3", "O3, release"}
    assert not any(row["note"] for row in found.values()), found
    assert all(float(row["peak_mib"]) > 0 for row in found.values())
    in_mib = parameter_count(**TOY_LLAMA) / 2**20  # one decimal is shown
    for level, weights, states in (("bf16-mixed", 4, 8), ("O1", 4, 8), ("O2", 2, 2), ("O3", 2, 2)):
        assert float(found[level]["weights"]) == pytest.approx(weights * in_mib, abs=0.06)
        assert float(found[level]["states"]) == pytest.approx(states * in_mib, abs=0.06)


@pytest.mark.long
def test_optimizer_counts_the_bytes_of_each_variant(results):
    """Read and written: weights and states; read: gradients.

    Of the toy model 4.57 % are norms and projections under 4096 elements, which stay FP32.
    """
    measured = {row["variant"]: row for row in rows(results, "optimizer.csv")}
    assert all(float(row["median_ms"]) > 0 for row in measured.values()), measured
    weight, moments, grad, scales = 2 * 2, 2 * 2, 2, 2 * 2 / 32
    large = {
        "fp8, 8 residual bits": weight + 2 + grad + moments + scales,
        "fp8, 8 residual bits, 8-bit gradients": weight + 2 + 1 + 1 / 32 + moments + scales,
        "fp8, 8 residual bits, update clipping": weight + 2 + grad + moments + scales,
    }
    small = 2 * 4 + 4 + 2 * 8
    moved = {
        name: float(row["bytes_per_parameter"]) for name, row in measured.items() if name != "copy"
    }
    assert moved.pop("torch AdamW, fp32") == small
    assert moved.pop("torch AdamW, bf16") == small / 2
    assert moved == {
        name: pytest.approx(0.9543 * value + 0.0457 * small, rel=1e-3)
        for name, value in large.items()
    }
    assert measured["copy"]["copy_share"] == "1.0"
    assert measured["torch AdamW, fp32"]["speedup"] == "1.0"
    losses = [float(row["loss"]) for name, row in measured.items() if name != "copy"]
    assert max(losses) < 1.1 * min(losses) < 0.02  # from 1.0


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*(f"{part}.csv" for part in (*PARTS, "loss", "moe")), "gpu_run.csv"]
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
def test_every_part_is_drawn(results):
    pytest.importorskip("matplotlib")
    assert {path.stem for path in results.glob("*.png")} == {*PARTS, "loss_curves"}


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


def test_a_plan_gives_each_part_its_estimate_and_says_what_it_leaves_out():
    names = list(run_gpu.PARTS)
    lines = [line.split() for line in run_gpu.plan(names, 540.0).splitlines()[1:]]
    assert [line[0] for line in lines] == names
    assert lines[0] == ["self-test", "90", "90"]
    assert lines[4] == ["block", "90", "60"]
    assert all(line[2:] == ["not", "run"] for line in lines[5:])
    assert run_gpu.time_of(["tests"], 540.0) == 540.0
    twice = [
        run_gpu.time_of(names[i:], 2.0 * sum(list(run_gpu.PARTS.values())[i:])) for i in (0, 4)
    ]
    assert twice == [180.0, 180.0]
    assert sum(run_gpu.PARTS.values()) < 1500  # of the half hour that a card is lent for


@pytest.fixture
def run_parts(tmp_path, monkeypatch):
    """``run_parts({part: code}, *arguments)``: rows of a run whose parts are these scripts."""

    def run(codes, *arguments):
        def command_of(name, results):
            return [sys.executable, "-c", codes[name]]

        monkeypatch.setattr(run_gpu, "command_of", command_of)
        command = ["run_gpu", "--toy", "--results", str(tmp_path), "--parts", *codes, *arguments]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            run_gpu.main()
        return ended.value.code, {r["part"]: r["result"] for r in rows(tmp_path, "gpu_run.csv")}

    return run


@pytest.mark.parametrize("status", [1, 3])
def test_a_self_test_that_fails_stops_the_rest(run_parts, capsys, status):
    code, ran = run_parts({"self-test": f"raise SystemExit({status})", "linear": "", "gemm": ""})
    assert code == 1
    assert ran == {"self-test": f"exit status {status}"}
    out = capsys.readouterr().out
    assert "the self-test fails" in out
    assert "not run: linear, gemm; python -m benchmarks.run_gpu --parts linear gemm" in out


def test_parts_without_time_are_listed(run_parts, capsys):
    code, ran = run_parts({"linear": "", "step": ""}, "--seconds", "100")
    assert code == 0
    assert ran == {"linear": "done", "step": "not run"}
    out = capsys.readouterr().out
    assert out.index("plan for 100 s") < out.index("== linear: up to 100 s")
    assert "not run: step; python -m benchmarks.run_gpu --parts step" in out


def test_results_lie_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path))
    assert run_gpu.default_results(toy=False) == tmp_path
    monkeypatch.delenv("OUT")
    assert run_gpu.default_results(toy=False) == OUTPUT


def test_a_test_that_did_not_end_is_not_run(tmp_path):
    path = tmp_path / "tests.csv"
    assert gpu_tests.counted(path) == {}
    results = gpu_tests.Results(path)
    results.pytest_xdist_node_collection_finished(None, ["a", "b", "c", "d"])
    for test, when, outcome in (
        *[("a", when, "passed") for when in ("setup", "call", "teardown")],
        *[("b", "setup", "passed"), ("b", "call", "failed"), ("b", "teardown", "passed")],
        *[("c", "setup", "skipped"), ("c", "teardown", "passed"), ("d", "setup", "passed")],
    ):
        results.pytest_runtest_logreport(
            pytest.TestReport(test, ("", 0, ""), {}, outcome, "wrong\nsum", when, duration=0.5)
        )
    found = {row["test"]: row for row in rows(tmp_path, "tests.csv")}
    assert [found[test]["result"] for test in "abcd"] == ["passed", "failed", "skipped", "not run"]
    assert (found["b"]["note"], found["b"]["seconds"]) == ("sum", "1.5")
    assert run_gpu.tests_told(path) == ", 1 passed, 1 failed, 1 skipped, 1 not run"


def test_what_a_card_has_passed_comes_last(tmp_path, monkeypatch):
    path = tmp_path / "gpu_tests.csv"
    path.write_text("test,result\na.py::f[0],passed\na.py::f[1],failed\na.py::g,not run\n")
    monkeypatch.setattr(gpu_tests, "COMMITTED", path)
    names = ["a.py::f[0]", "a.py::f[1]", "a.py::f[2]", "a.py::g", "test_quantize_gpu.py::h"]
    items = [type("Item", (), {"nodeid": name})() for name in names]
    gpu_tests.pytest_collection_modifyitems(items)
    assert [names.index(item.nodeid) for item in items] == [4, 1, 3, 2, 0]


def test_the_files_with_gpu_tests_are_all_that_is_collected():
    """The others need packages that a machine with a card may lack: an error when collecting."""
    files = {Path(path).relative_to(ROOT).as_posix() for path in run_gpu.gpu_tests("tests")}
    assert "tests/torch_fp8/test_cuda.py" in files
    assert "tests/torch_fp8/conversion/test_autotune.py" in files
    assert "tests/torch_fp8/nn/test_linear.py" not in files
    for path in (ROOT / "tests").rglob("*.py"):
        if "pytest.mark.gpu" in path.read_text():
            assert path.relative_to(ROOT).as_posix() in files | {"tests/benchmarks/test_run_gpu.py"}


def test_tests_run_side_by_side_but_those_that_compare_times(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    tests, timing = (run_gpu.command_of(name, ROOT) for name in ("tests", "timing"))
    assert tests[tests.index("-m", 3) + 1] == "gpu and not alone"
    assert tests[-2:] == ["-n", "12"]
    assert timing[timing.index("-m", 3) + 1] == "gpu and alone"
    test = run_gpu.command_of("self-test", ROOT)
    assert test[test.index("--only") + 1 :] == ["kernels", "recipes", "speed", "exchange"]
    assert "-n" not in timing
    monkeypatch.setattr(run_gpu.importlib.util, "find_spec", lambda name: None)
    assert "-n" not in run_gpu.command_of("tests", ROOT)


def script(tmp_path, text):
    path = tmp_path / "part.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_a_part_that_a_signal_ends_is_a_failure(run_parts):
    died = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run_parts({"gemm": died}) == (1, {"gemm": "exit status -9"})


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_part_is_ended_in_time_with_all_that_it_started(tmp_path, monkeypatch, stubborn):
    """A worker may not be there beside the next part."""
    monkeypatch.setattr(run_gpu, "GRACE", 2.0)
    command = script(
        tmp_path,
        "import signal, subprocess, sys, time\n"
        f"if {stubborn}: signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(60)\n",
    )
    began = time.monotonic()
    status, result = run_gpu.run_part("gemm", command, 2.0)
    assert time.monotonic() - began < 10
    assert (status, result) == (1, "ended after 2 s")


def test_what_a_part_left_running_is_ended(tmp_path, capfd):
    command = script(
        tmp_path,
        "import subprocess, sys\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " stdout=subprocess.DEVNULL)\n"
        "print(worker.pid, flush=True)\n",
    )
    assert run_gpu.run_part("gemm", command, 30.0) == (0, "done")
    worker = int(capfd.readouterr().out.split()[-1])
    for _ in range(50):
        state = Path(f"/proc/{worker}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("it still runs")


def test_a_part_that_was_ended_is_drawn_from_the_rows_it_has(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(run_gpu, "draw", drawn.append)
    run_gpu.draw_what_there_is(tmp_path / "gemm.csv")
    assert not drawn
    (tmp_path / "gemm.csv").write_text("gemm\n")
    run_gpu.draw_what_there_is(tmp_path / "gemm.csv")
    assert drawn == [tmp_path / "gemm.csv"]
    monkeypatch.setattr(run_gpu, "draw", lambda path: 1 / 0)
    run_gpu.draw_what_there_is(tmp_path / "gemm.csv")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_full_size_is_refused(forked_hosts):
    command = [forked_hosts, "-m", "benchmarks.run_gpu"]
    run = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, check=False, cwd=ROOT
    )
    assert run.returncode == 2
    assert "--toy" in run.stderr
