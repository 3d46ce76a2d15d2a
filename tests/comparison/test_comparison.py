"""The comparison of two runs, when one of them fails."""

import sys

import comparison
import pytest


def test_a_run_that_fails_ends_the_comparison(tmp_path):
    commands = {"bf16-mixed": [sys.executable, "-c", "raise SystemExit(3)"], "fp8-mixed": []}
    with pytest.raises(SystemExit) as stopped:
        comparison.compare(commands, tmp_path)
    assert stopped.value.code == 3
    assert not (tmp_path / "comparison.csv").exists()
