"""``torch-fp8 compare`` on a tiny program, by itself or behind a launcher."""

import json
from pathlib import Path

import pytest

from tests.internals import cli

PROGRAM = Path(__file__).parent / "programs/tiny.py"


@pytest.fixture
def compare(tmp_path, monkeypatch, forked_hosts):
    """``compare(host, *options, ...)``: the exit status and the report.

    `launch`: words in front of the program, in place of the Python alone.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*words, steps=6, variants=("bf16", "O2"), arguments=("--no-repeat",), launch=None):
        program = [*(launch or [forked_hosts, str(PROGRAM)]), *map(str, words)]
        given = ["--steps", str(steps), "--variants", *variants, "--output", "out", *arguments]
        status = cli.main(["compare", *given, "--", *program])
        return status, json.loads(Path("out/report.json").read_text())

    return run
