"""Graphs of torch.compile for a card, in which an operator is its kernels, emulated."""

import pytest

from tests.emulator.test_steps import distances

CASES = ["llama tensorwise", "llama delayed", "llama rowwise", "llama blockwise"]
CASES += ["experts tensorwise", "experts blockwise"]
IN_CI, SLOW = [pytest.param(CASES[0], marks=pytest.mark.long)], pytest.mark.slow


@pytest.mark.parametrize("case", IN_CI + [pytest.param(c, marks=SLOW) for c in CASES[1:]])
def test_kernels_in_a_graph_give_the_bits_of_whole_operators(case):
    result = distances(case, module="graphs")[case]
    assert result["unequal"] == []
    assert len(result["whole operators"]) > 5
    assert all(name.endswith("_mm") for name in result["operators"])
    if "llama" in case:
        assert result["same launches"]
