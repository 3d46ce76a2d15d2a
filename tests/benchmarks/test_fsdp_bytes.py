"""Bytes that FSDP2 sends, counted on fake tensors; see benchmarks/evidence/fsdp_bytes.py."""

import pytest

from benchmarks.evidence.fsdp_bytes import rows

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ratios():
    return {(row["case"], row["model"]): float(row["ratio"]) for row in rows(4)}


def test_bytes_of_converted_weights(ratios):
    assert ratios["FSDP2 gather", "a block's linears"] <= 0.52
    assert ratios["FSDP2 scatter", "a block's linears"] <= 0.53


def test_bytes_of_llama_3_1_8b(ratios):
    assert ratios["FSDP2 gather", "Llama-3.1-8B"] <= 0.57
    assert ratios["FSDP2 scatter", "Llama-3.1-8B"] <= 0.58


def test_bytes_of_experts(ratios):
    experts = "experts of a block of Qwen3-30B-A3B"
    assert ratios["FSDP2 gather", experts] <= 0.51
    assert ratios["FSDP2 scatter", experts] <= 0.53
