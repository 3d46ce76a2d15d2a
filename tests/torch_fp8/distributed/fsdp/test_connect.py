import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.internals import UnshardedFloat8Weight
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed import connect_fsdp

pytestmark = pytest.mark.long


RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"]
FREED = "the unsharded weight was freed by FSDP"


@pytest.fixture(scope="module")
def gathers(run_cases):
    return run_cases("fsdp_gather_cases,fsdp_lifecycle_cases", 2)


@pytest.fixture(scope="module")
def meshes(run_cases):
    return run_cases("fsdp_mesh_cases", 4)


@pytest.fixture(scope="module")
def scatters(run_cases):
    return run_cases("fsdp_scatter_cases", 2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gathered_bytes_are_those_of_a_cast_on_one_device(gathers, recipe, dtype):
    for value in gathers["bits"]:
        number, seen, equal = value[f"{recipe} {dtype}"]
        # MX scales travel with the bytes, which FSDP allows where it need not pad: not 33 rows.
        assert number == seen == (4 if recipe == "mxfp8" else 5)
        assert equal


def test_an_optimizer_that_keeps_its_states_steps_shards_as_the_whole(gathers):
    for num_split, split, equal in gathers["own_states"]:
        assert num_split == split == 4
        assert equal


@pytest.mark.parametrize(("after_forward", "kept"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_payloads_are_freed_as_fsdp_frees_weights(gathers, recipe, after_forward, kept):
    for value in gathers["freed"]:
        whole, forward, backward, reads = value[f"{recipe} {after_forward}"]
        # One byte for each element, and MX's scales: there is nothing else.
        assert whole == pytest.approx(1 + (recipe == "mxfp8") / 32, abs=0.01)
        assert forward == kept * whole
        assert backward == 0
        assert FREED in reads


@pytest.mark.parametrize("bad", ["inf", "nan"])
@pytest.mark.parametrize(
    ("recipe", "number"),
    [("tensorwise", 64 * 96), ("rowwise", 96), ("blockwise", 64 * 96), ("mxfp8", 32)],
)
def test_every_rank_sees_a_bad_weight_of_one(gathers, recipe, number, bad):
    assert [value[f"{recipe} {bad}"] for value in gathers["nonfinite"]] == [number] * 2


def test_every_rank_sees_the_nan_of_ones_gradients(gathers):
    for value in gathers["nonfinite"]:
        assert len(value["gradients"]) == 15
        assert all(value["gradients"])


def test_tied_layers_gather_once_and_what_a_plain_layer_shares_as_it_is(gathers):
    for value in gathers["options"]:
        number, loss, alone = value["tied"]
        assert number == 1
        assert loss == alone
        number, report = value["tied to a plain layer"]
        assert number == 0
        assert "a module in high precision shares it" in report


def test_frozen_weights_are_gathered_in_fp8_and_are_no_missing_gradients(gathers):
    for value in gathers["options"]:
        assert value["frozen"] == [5, 0, 0]


def test_communication_off_is_stock_and_can_be_undone(gathers):
    for value in gathers["options"]:
        assert value["off"] == [0, 0, 0]
        assert value["on again"] == [5, 5]


def test_a_reduce_scatter_of_the_users_stays(gathers):
    for value in gathers["options"]:
        gathered, scattered, report, kept, stock_when_off = value["users scatter"]
        assert (gathered, scattered) == (5, 2)
        assert "not '1': it has a custom reduce-scatter" in report
        assert kept
        assert stock_when_off


def test_shards_of_the_second_dimension(gathers):
    for value in gathers["options"]:
        for recipe, number in (("tensorwise", 5), ("rowwise", 0)):
            gathered, report, loss, alone = value["second dimension"][recipe]
            assert gathered == number
            assert loss == alone
            assert ("rowwise scales need whole rows" in report) == (number == 0)


def test_what_fsdp_moves_from_the_cpu_is_asked_there(gathers):
    """With CPU offload; here another dtype stands for another device."""
    for value in gathers["options"]:
        assert value["offload"] == [5, "torch.uint8", False, True]


@pytest.mark.parametrize("when", ["before the first forward", "after it"])
def test_shards_that_were_replaced_are_connected_by_the_next_forward(gathers, when):
    for value in gathers["lost"]:
        before, lost, after, dtypes, loss, alone = value[when]
        assert (before, lost, after) == (5, 0, 5)
        assert dtypes == ["torch.bfloat16" if when != "after it" else "torch.float32"]
        assert loss == pytest.approx(alone, rel=0.02 if when != "after it" else 0)


def test_weights_that_were_assigned_are_gathered(gathers):
    for value in gathers["lost"]:
        lost, after, loss, alone = value["assign"]
        assert (lost, after) == (0, 5)
        assert loss == alone
        assert value["again"] == [5, True]  # and connecting twice adds no hook


def test_converting_again_takes_gathered_weights_for_weights(gathers):
    for value in gathers["lost"]:
        assert value["converted again"] == [["UnshardedFloat8Weight"] * 5, 5]


def test_an_evaluation_in_high_precision_gathers_so_and_keeps_gradients(gathers):
    """``eval_fp8=False``, between two micro-batches."""
    for value in gathers["lost"]:
        exact, fp8_weights, gradients_equal = value["evaluation"]
        assert exact
        assert fp8_weights == 0
        assert gradients_equal


def test_a_forward_in_bf16_gathers_weights_in_high_precision(gathers):
    for value in gathers["lost"]:
        assert value["forward in BF16"] == [True, 0, True]


def test_gathers_that_no_forward_announced_have_scales_of_their_own(gathers):
    """One collective for each group of FSDP's, and never an old scale."""
    for value in gathers["without_root"]:
        right, calls = value["unshard"]
        assert right == [True] * 3
        assert calls == 2
        calls, right = value["child"]
        assert calls == 1
        assert right == [True] * 2
        first, alone, grown, alone_grown = value["method"]
        assert (first, grown) == (alone, alone_grown)


def test_delayed_scales_are_those_of_one_device(gathers):
    """Histories and scales, bit for bit; the next gather takes the scale."""
    for value in gathers["delayed"]:
        *steps, next_scale = value
        assert steps == [[True, True]] * 3
        assert next_scale == 1


def test_recomputed_and_prefetched_weights_are_those_of_a_plain_run(gathers):
    for value in gathers["recomputed"]:
        assert value == [[True, True, True, 1]] * 4


def test_copies_and_pickles_are_plain(gathers):
    for value in gathers["copies"]:
        assert all(value["plain"])
        assert value["equal"]
        assert value["attached"] == 5
        assert value["gathered"] == ["Tensor", True, True]
        assert "write to the sharded parameter" in value["written"]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_losses_of_two_ranks_are_those_of_one(scatters, level):
    for value in scatters["one_rank"]:
        ranks, alone = value[level]
        assert ranks == pytest.approx(alone, rel=0.05, abs=0.015 * alone[0])
        assert sum(ranks) == pytest.approx(sum(alone), rel=0.01)


@pytest.mark.parametrize("ranks", ["scatters", "meshes"])
def test_bytes_against_bf16(request, ranks):
    for value in request.getfixturevalue(ranks)["bytes"]:
        stock = {kind: (calls, sent) for kind, _, calls, sent in value["off"]}
        ours = {kind: (dtype, calls, sent) for kind, dtype, calls, sent in value["fp8"]}
        assert sorted(ours) == ["all-gather", "all-reduce", "all-to-all"]
        assert ours["all-gather"][:2] == ("torch.uint8", stock["all-gather"][0])
        assert ours["all-to-all"][:2] == ("torch.uint8", stock["reduce-scatter"][0])
        assert ours["all-reduce"][1] == 1  # the scales of all weights
        gather = ours["all-gather"][2] + ours["all-reduce"][2]
        assert gather <= 0.52 * stock["all-gather"][1]
        assert ours["all-to-all"][2] <= 0.53 * stock["reduce-scatter"][1]


@pytest.mark.parametrize("option", ["averaged", "divided", "accumulated", "summed"])
@pytest.mark.parametrize(
    ("policy", "plain"),
    [
        ("fp32", 0.003),
        ("bf16", 0.004),
        ("bf16 reduced in fp32", 0.003),
        ("bf16 reduced in fp16", 0.003),
    ],
)
def test_gradients_are_exact_up_to_their_rounding(scatters, policy, plain, option):
    """Of FP8 weights: one rounding, at most 0.0155 of an addend. Of others: of BF16."""
    for value in scatters["scatter"]:
        eight_bit, others = value[f"{policy} {option}"]
        assert 0.005 < eight_bit < 0.0155
        assert others <= plain


@pytest.mark.parametrize(
    ("grads", "count"),
    [
        *(("sharded", 64), ("whole, float32", 64), ("whole, float32", 512)),
        *(("whole, BF16", count) for count in (64, 512, 2048)),
    ],
)
def test_a_sum_of_many_micro_batches_does_not_fall_short(scatters, grads, count):
    for value in scatters["many_micro_batches"]:
        *projections, decibels = value[f"{grads} {count}"]
        assert projections == pytest.approx([1, 1], abs=0.003)
        assert decibels >= 30


def test_where_gradients_are_missing_the_rest_is_right_and_a_warning_says_so(scatters):
    for value in scatters["unused"]:
        assert value["right"]
        assert value["left"] == [6.0, 6.0]  # of 4 * 1 and 4 * 2, the mean
        assert len(value["warnings"]) == 1
        assert "reduced in BF16" in value["warnings"][0]


@pytest.mark.parametrize("micro_batches", ["1", "4"])
def test_gradients_of_8_bits_accumulate_and_are_clipped(scatters, micro_batches):
    for value in scatters["o3"]:
        eight_bit, (norm, plain), clipped = value[micro_batches]
        assert eight_bit == 4
        assert norm == pytest.approx(plain, rel=0.01)
        assert clipped == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_shards_of_few_rows_and_of_none(meshes, recipe):
    """33, 5, 3 and 1 rows on four ranks."""
    for value in meshes["few_rows"]:
        number, equal, errors = value[recipe]
        assert number == (0 if recipe == "mxfp8" else 4)
        assert equal == [True] * number
        assert max(errors) < 0.06  # of gradients against one rank's


def test_replicas_of_shards(meshes):
    for value in meshes["two_dimensions"]:
        ranks, alone, rows = value
        assert ranks == pytest.approx(alone, rel=0.05, abs=0.015 * alone[0])
        assert sum(ranks) == pytest.approx(sum(alone), rel=0.01)
        assert rows == [
            ["all-gather", "torch.uint8", 2, 5 + 3],
            ["all-reduce", "torch.float32", 2, 1],
            ["all-to-all", "torch.uint8", 2, 3 + 3],  # among shards, and among replicas
        ]


def test_resharding_to_a_number_of_ranks_gathers_as_it_is_and_says_so(meshes):
    for value in meshes["number"]:
        gathers, scatters, report, rows = value
        assert (gathers, scatters) == (0, 3)
        assert "not '0.weight' and 4 more: reshard_after_forward is an integer" in report
        assert ["all-to-all", "torch.uint8", 4] in rows
        assert ["all-gather", "torch.uint8", 4] not in rows


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_single_rank_trains_as_without_fsdp(single_process_group, recipe):
    torch.manual_seed(0)
    model, alone = (nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32)) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    config = FP8Config(recipe=recipe, emulate=True)
    for one in (model, alone):
        convert_to_float8(one, config)
    fully_shard(model)
    report = connect_fsdp(model, config)
    assert report.num_gathers == (0 if recipe == "mxfp8" else 2)
    losses = []
    for one in (model, alone):
        loss = one(torch.ones(4, 64)).square().mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    model.unshard()
    assert isinstance(model[0].weight, UnshardedFloat8Weight) == (recipe != "mxfp8")


@pytest.mark.parametrize("recipe", RECIPES)
def test_transposed_weights_on_two_ranks_are_those_of_one(gathers, recipe):
    """Payloads gathered are those cast on one rank, but for rowwise's, whose rows are the inputs'
    on a shard; gradients are scattered in 8 bits."""
    for value in gathers["conv1d"]:
        output, gradient, loss, alone = value[recipe]
        assert output > (35 if recipe == "rowwise" else 100)
        assert gradient > 30
        assert loss == pytest.approx(alone, rel=0.03)  # casts of a rank's inputs have its scale
