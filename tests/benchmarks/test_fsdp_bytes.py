"""Bytes that FSDP2 sends, counted on fake tensors; see benchmarks/evidence/fsdp_bytes.py."""

from unittest import mock

import pytest

from benchmarks.evidence import fsdp_bytes

pytestmark = pytest.mark.long


def bytes_with(layers, models):
    """(case, model) -> bytes of BF16 collectives and of ours, of so many blocks of Llama."""
    with mock.patch.multiple(fsdp_bytes, LAYERS=layers, MODELS=models):
        rows = fsdp_bytes.rows(4)
    return {(row["case"], row["model"]): (row["bf16_bytes"], row["fp8_bytes"]) for row in rows}


@pytest.fixture(scope="module")
def ratios():
    """Of Llama two blocks are counted, and what a third adds, for all send alike."""
    models, name = fsdp_bytes.MODELS, "Llama-3.1-8B"
    counted = bytes_with(2, models)
    for key, more in bytes_with(3, {name: models[name]}).items():
        times = fsdp_bytes.LAYERS - 2
        counted[key] = [a + (b - a) * times for a, b in zip(counted[key], more, strict=True)]
    return {key: fp8 / bf16 for key, (bf16, fp8) in counted.items()}


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
