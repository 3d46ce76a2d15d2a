"""Fused experts on two ranks against one process, trained, frozen and watched.

All cases share two processes: most of what a case takes is what the first one in a process takes.
"""

import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cases(run_cases):
    return run_cases("moe_cases,moe_frozen_cases,moe_watched_cases", 2)


def test_experts_under_ddp_have_8_bit_gradients(cases):
    for want, losses, agreement, eight_bit in cases["ddp"]:
        assert losses == pytest.approx(want, rel=0.005)
        assert agreement > 20  # gradients in 8 bits, summed once more over ranks
        assert eight_bit >= 2


@pytest.mark.parametrize("case", ["fsdp2", "expert_parallel"])
def test_sharded_experts_train_as_in_one_process(cases, case):
    """Expert parallelism weights rows behind the second GEMM, not before its cast."""
    for want, losses, agreement, _ in cases[case]:
        assert losses == pytest.approx(want, rel=0.005)
        assert agreement > 20


def test_ranks_that_share_a_batch_sum_the_outputs_of_their_experts(cases):
    """Expert parallelism by an all-reduce, of a model of which no FP8 layer is cut."""
    for want, losses, agreement, summary in cases["all_reduce"]:
        assert losses == pytest.approx(want, rel=0.005)
        assert agreement > 20
        assert "6 of 7 linear layers" in summary
        assert "tp_plan" not in summary


def test_layers_that_transformers_cuts_stay_in_bf16_beside_experts_in_fp8(cases):
    for want, losses, agreement, summary in cases["all_reduce_beside_cut_layers"]:
        assert losses == pytest.approx(want, rel=0.005)
        assert agreement > 20
        assert "2 fused weights in FP8" in summary
        assert "and 1 more: its forward was replaced on the instance, for tensor" in summary


@pytest.mark.parametrize("case", ["gathered_plain", "gathered_transposed"])
def test_payloads_are_gathered_as_each_gemm_takes_them(cases, case):
    for gathers, same, ratio, turned, agreement in cases[case]:
        assert gathers == 2
        assert same == [[True, True]] * 2
        assert ratio <= 0.57
        assert turned == 0
        assert agreement > 20  # gradients in 8 bits


@pytest.mark.parametrize("case", ["gathered_under_a_checkpoint", "kept_between"])
def test_what_is_gathered_once_for_both_is_transposed(cases, case):
    """Forward is the same; backward's payload has been rounded by rows before."""
    for _, same, ratio, turned, agreement in cases[case]:
        assert [forward for forward, _ in same] == [True, True]
        assert ratio <= 0.57
        assert turned >= 4
        assert agreement > 20


def test_experts_that_do_not_divide_travel_as_they_are(cases):
    for gathers, report in cases["not_gathered"]:
        assert gathers == 0
        assert "3 experts are not divisible by 2 ranks" in report


def test_a_gathered_weight_reads_as_a_tensor(cases):
    for shape, values in cases["reads_as_a_tensor"]:
        assert len(values) == 2
        for seen, dtype, agreement in values:
            assert (seen, dtype) == (shape, "torch.bfloat16")
            assert agreement > 30.5


def test_a_graph_finds_in_backward_what_it_has_saved(cases):
    """Eager code gathers the transposed payload in backward, a graph the forward's again."""
    for forwards, agreement, flips in cases["compiled"]:
        assert forwards == [True] * 3
        assert agreement > 35
        assert flips == [False, False, True, True] + [False] * 8


@pytest.mark.parametrize("case", ["frozen_fsdp", "frozen_ddp"])
def test_adapters_over_frozen_experts_train_as_in_one_process(cases, case):
    check_adapters(cases, case)


@pytest.mark.slow
def test_adapters_over_frozen_experts_of_every_layout(run_cases):
    found = run_cases("moe_cases,moe_frozen_cases", 2, "frozen_fsdp", EVERY_LAYOUT="1")
    check_adapters(found, "frozen_fsdp")


def check_adapters(cases, case):
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
        assert reasons == ["3 experts are not divisible by 2 ranks"]


def test_experts_of_other_ranks_are_not_frozen(cases):
    for kept, held, loss in cases["parallel_not_frozen"]:
        assert held == 0
        assert len(kept) == 2
        assert all("ranks" in reason for _, reason in kept), kept
        assert loss == loss


def test_a_monitor_counts_the_tokens_of_all_ranks(cases):
    for tokens, empty, most, what in cases["monitored"]:
        assert tokens == [64, 0]
        assert empty == [0, 2]
        assert most == 192
        assert "no token since step 1 for experts 1, 3" in what


@pytest.mark.parametrize("case", ["monitored_sharded", "monitored_parallel"])
def test_a_monitor_looks_at_sharded_experts(cases, case):
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
