"""The model on paper: against figures that were computed independently."""

import pytest

from benchmarks.roofline import (
    CARDS,
    TRAFFIC,
    fused_linears,
    linears_seconds,
)
from benchmarks.shapes import LLAMA_3_1_8B_BLOCK

METHODS = (
    *("torchao tensorwise", "torchao rowwise", "torchao blockwise"),
    *("Transformer Engine delayed", "blockwise, weights cached", "fused"),
)


@pytest.mark.parametrize(
    ("card", "tokens", "published"),
    [
        ("H100", 4096, (1.51, 1.41, 1.56, 1.68, 1.74, 1.92)),
        ("H100", 16384, (1.67, 1.58, 1.68, 1.78, 1.79, 1.98)),
        ("H200", 4096, (1.63, 1.55, 1.67, 1.77, 1.81, 1.95)),
        ("H200", 16384, (1.76, 1.69, 1.77, 1.84, 1.85, 1.99)),
    ],
)
def test_ceilings_of_the_published_model(card, tokens, published):
    """Computed once by hand for qkv, o, gate_up and down with the same constants."""
    fused = fused_linears(LLAMA_3_1_8B_BLOCK)
    assert sorted(fused.values()) == [(4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096)]
    bf16 = linears_seconds(tokens, fused, CARDS[card], None)
    found = [bf16 / linears_seconds(tokens, fused, CARDS[card], TRAFFIC[m]) for m in METHODS]
    assert found == pytest.approx(published, abs=0.0075)  # their second digit, and a half
