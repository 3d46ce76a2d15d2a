"""Fixtures for the tests of the command line: those of the engine's tests."""

from tests.torch_fp8.conftest import case, run_cases, run_ranks

__all__ = ["case", "run_cases", "run_ranks"]
