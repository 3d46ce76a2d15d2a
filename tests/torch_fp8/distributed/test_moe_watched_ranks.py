"""The monitor, routing replay and ``auto`` with experts on two ranks."""

import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cases(run_parallel_cases):
    return run_parallel_cases("moe_watched_cases", 2)


def test_a_monitor_counts_the_tokens_of_all_ranks(cases):
    for tokens, empty, most, what in cases["monitored"]:
        assert tokens == [64, 0]
        assert empty == [0, 2]
        assert most == 192
        assert "no token since step 1 for experts 1, 3" in what


@pytest.mark.parametrize("case", ["monitored_sharded", "monitored_parallel"])
def test_a_monitor_looks_at_sharded_experts(cases, case):
    """Two sequences of 16 tokens a rank, two of four experts each."""
    for series in cases[case]:
        place = "fp8/model.layers.0.mlp.experts"
        for weight in ("gate_up_proj", "down_proj"):
            for kind in ("input", "weight", "grad_output"):
                assert series[f"{place}.{weight}/{kind}/sqnr"] > 29, (weight, kind)
        most = series[f"{place}/experts/tokens_most"]
        assert 128 / 4 <= most <= 128


@pytest.mark.parametrize("case", ["replayed_sharded", "replayed_parallel"])
def test_sharded_experts_take_replayed_choices(cases, case):
    for want, got, same, grad, other, changed in cases[case]:
        assert got == want
        assert same == 0
        assert grad > 0
        assert other > 0
        assert changed != want


def test_ranks_with_other_times_decide_alike(cases):
    counts = {(count, tuple(reasons)) for count, _, reasons in cases["auto"]}
    assert len(counts) == 1
    assert sorted(bool(runs) for _, runs, _ in cases["auto"]) == [False, True]
