"""Graphs of torch.compile for a card, in which an operator is its kernels, emulated."""

import pytest

from tests.emulator.test_steps import distances

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
CASES = [f"{model} {recipe}" for model in ("llama", "experts") for recipe in RECIPES]
CASES += [f"{case} dynamic" for case in CASES]
CASES += [f"llama {recipe} payloads" for recipe in RECIPES]
IN_CI = ("llama tensorwise dynamic", "llama delayed payloads")
MARKS = {case: pytest.mark.long if case in IN_CI else pytest.mark.slow for case in CASES}


@pytest.mark.parametrize("case", [pytest.param(case, marks=mark) for case, mark in MARKS.items()])
def test_kernels_in_a_graph_give_the_bits_of_whole_operators(case):
    result = distances(case, module="graphs")[case]
    different = result["unequal"]  # sums over rows are in another order if their number is unknown
    assert all("norm" in name for name in different) if "dynamic" in case else not different
    assert result["graphs"] == 2  # forward and backward
    assert len(result["whole operators"]) > 5
    assert all(name.endswith("_mm") for name in result["operators"])
    if case.startswith("llama") and "dynamic" not in case:
        assert result["same launches"]
    assert result["sums"] == 3 * (case.startswith("llama delayed") and "dynamic" not in case)
