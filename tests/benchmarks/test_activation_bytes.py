"""Bytes that a Llama block keeps for backward; see benchmarks/activation_bytes.py."""

import csv

import pytest

from benchmarks.activation_bytes import LAYOUTS, RESULTS, VARIANTS


@pytest.fixture(scope="module")
def shares():
    with (RESULTS / "activation_bytes.csv").open(newline="") as file:
        return {(r["layout"], r["variant"]): float(r["share"]) for r in csv.DictReader(file)}


def test_everything_is_in_the_file(shares):
    assert set(shares) == {(la, v) for la in LAYOUTS for v in ("BF16 eager", *VARIANTS)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_keeps_less_than_half(shares, layout):
    """COAT (arXiv 2410.19313, table 3): 0.59."""
    assert shares[layout, "tensorwise (default)"] <= 0.50
