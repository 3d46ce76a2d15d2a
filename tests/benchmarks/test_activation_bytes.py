"""Bytes that a Llama block keeps for backward; see benchmarks/evidence/activation_bytes.py."""

import csv

import pytest

from benchmarks.evidence.activation_bytes import CHECKPOINTED, LAYOUTS, VARIANTS, kept_checkpointed
from benchmarks.rows import RESULTS


@pytest.fixture(scope="module")
def shares():
    with (RESULTS / "activation_bytes.csv").open(newline="") as file:
        return {(r["layout"], r["variant"]): float(r["share"]) for r in csv.DictReader(file)}


def test_everything_is_in_the_file(shares):
    variants = ("BF16 eager", *VARIANTS, CHECKPOINTED)
    assert set(shares) == {(la, v) for la in LAYOUTS for v in variants}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_keeps_less_than_none(shares, layout):
    assert shares[layout, "checkpointed"] <= 0.1 * shares[layout, "tensorwise (default)"]


def test_what_a_checkpoint_keeps_and_repeats():
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    assert kept_checkpointed(sizes) == (2 * 128, 7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_keeps_less_than_half(shares, layout):
    """COAT (arXiv 2410.19313, table 3): 0.59."""
    assert shares[layout, "tensorwise (default)"] <= 0.50
