"""Fixtures for the tests of the command line: those of the engine's tests."""

from tests.torch_fp8.conftest import run_ranks

__all__ = ["run_ranks"]
