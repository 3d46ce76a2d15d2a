"""Frozen experts on two ranks against one process."""

import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cases(run_parallel_cases):
    return run_parallel_cases("moe_frozen_cases", 2)


@pytest.mark.parametrize("case", ["frozen_fsdp", "frozen_ddp"])
def test_adapters_over_frozen_experts_train_as_in_one_process(cases, case):
    """A byte an element and a scale a row, outputs of the first step bit for bit."""
    for layouts in cases[case]:
        for layout, figures in layouts.items():
            assert figures["same"][0], layout
            assert figures["adapters"] > 40, layout
            assert figures["frozen"] == 2
            assert 1 < figures["bytes"] <= 1 + 4 / 48
            frozen, plain = figures["weights"]
            assert plain - frozen == figures["numel"]  # BF16 becomes a byte; scales count apart
            if case == "frozen_fsdp":
                assert figures["gathers"][0] <= figures["gathers"][1]


def test_sharded_experts_are_frozen_in_place_and_saved_plain(cases):
    for frozen, held, agreement, same, refused in cases["frozen_later"]:
        assert (frozen, held, same) == (2, 2, True)
        assert agreement > 30.5
        assert "thaw the model before fully_shard" in refused


def test_experts_that_do_not_divide_are_not_frozen(cases):
    for frozen, reasons in cases["not_frozen"]:
        assert frozen == 0
        assert reasons == ["3 experts do not divide by 2 ranks"]


def test_experts_of_other_ranks_are_not_frozen(cases):
    for kept, held, loss in cases["parallel_not_frozen"]:
        assert held == 0
        assert len(kept) == 2
        assert all("ranks" in reason for _, reason in kept), kept
        assert loss == loss
