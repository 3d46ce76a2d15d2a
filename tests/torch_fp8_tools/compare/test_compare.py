"""``torch-fp8 compare`` on tiny programs under each host, and on those it cannot compare."""

import json
from pathlib import Path

import pytest

from torch_fp8_tools import cli

PROGRAM = Path(__file__).parent / "programs/tiny.py"


@pytest.fixture
def compare(tmp_path, monkeypatch, forked_hosts):
    """``compare(host, *options, ...)``: the exit status and the report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(host, *options, steps=6, variants=("bf16", "O2"), arguments=("--no-repeat",)):
        program = [forked_hosts, str(PROGRAM), host, *map(str, options)]
        given = ["--steps", str(steps), "--variants", *variants, "--output", "out", *arguments]
        status = cli.main(["compare", *given, "--", *program])
        return status, json.loads(Path("out/report.json").read_text())

    return run


@pytest.mark.parametrize(
    ("host", "said"),
    [
        *(("accelerate", "fp8"), ("fabric", "bf16"), ("trainer", "fp8"), ("trainer", "bf16")),
        *(("transformers", "bf16"), ("own", "fp8")),
    ],
)
def test_a_program_runs_in_both_precisions_whatever_it_says(host, said, compare):
    status, report = compare(host, "--precision", said)
    assert status == 0, report
    bf16, fp8 = report["variants"]
    assert bf16["steps"] == fp8["steps"] == 6
    assert (bf16["layers"], bf16["fp8_layers"]) == (0, 0)
    assert (fp8["layers"], fp8["fp8_layers"]) == (4, 2)
    assert abs(fp8["loss_difference"]) < 0.01
    assert bf16["loss"] != fp8["loss"]
    assert min(fp8["peak_bytes"], bf16["peak_bytes"]) > 4 * 4 * 8775  # weights, AdamW, gradients
    assert not [note for note in report["notes"] if "other weights" in note or "batches" in note]
    assert json.loads(Path("out/fp8_config.json").read_text())["opt_level"] == "O2"
