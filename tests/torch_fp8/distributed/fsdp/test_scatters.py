"""Gradients that FSDP2 scatters in FP8, whole steps, and meshes of four ranks."""

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from tests.comm_counter import count_communication
from tests.internals import Float8Grad, make_recipe, to_float8
from tests.torch_fp8.distributed.cases.fsdp_ranks import (
    BF16,
    Branches,
    batch,
    loss_of,
    model_of,
    sharded,
    trained,
    unshard,
    weights_of,
)
from tests.torch_fp8.distributed.ranks import RANK, RANKS, on_ranks, worst_sum
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed import connect_fsdp
from torch_fp8.ops.quantize import quantize

pytestmark = pytest.mark.long


@on_ranks(2, 4)
def test_bytes_against_bf16():
    rows = {}
    for communication in ("off", "fp8"):
        config = FP8Config(opt_level="O1", communication=communication)
        layers = [nn.Linear(256, 256, bias=False) for _ in range(4)]
        convert_to_float8(nn.ModuleList(layers), config)
        for layer in layers[:2]:
            fully_shard(layer, mp_policy=BF16, reshard_after_forward=True)
        model = nn.Sequential(*layers)
        fully_shard(model, mp_policy=BF16)
        connect_fsdp(model, config)
        for _ in range(2):
            with count_communication() as count, torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(4, 256)).square().mean().backward()
        rows[communication] = {row.kind: row for row in count.rows}
    stock, ours = rows["off"], rows["fp8"]
    assert sorted(ours) == ["all-gather", "all-reduce", "all-to-all"]
    for kind, theirs in (("all-gather", "all-gather"), ("all-to-all", "reduce-scatter")):
        assert ours[kind].dtype == torch.uint8
        assert ours[kind].calls == stock[theirs].calls
    assert ours["all-reduce"].calls == 1  # the scales of all weights
    gather = ours["all-gather"].bytes_sent + ours["all-reduce"].bytes_sent
    assert gather <= 0.52 * stock["all-gather"].bytes_sent
    assert ours["all-to-all"].bytes_sent <= 0.53 * stock["reduce-scatter"].bytes_sent


@on_ranks(2)
def test_gradients_are_exact_up_to_their_rounding():
    """Of FP8 weights: one rounding, at most 0.0155 of an addend. Of others: of BF16."""
    policies = {
        "fp32": MixedPrecisionPolicy(),
        "bf16": BF16,
        "bf16 reduced in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "bf16 reduced in fp16": MixedPrecisionPolicy(torch.bfloat16, torch.float16),
    }
    for name, policy in policies.items():
        for option in ("averaged", "divided", "accumulated", "summed"):
            exact = gradients(MixedPrecisionPolicy(policy.param_dtype, torch.float32), option, True)
            made = gradients(policy, option, False)
            errors = {True: 0.0, False: 0.0}
            for key, grad in exact.items():
                if option == "divided":
                    grad = grad * RANKS / 8
                eight = key.endswith(("0.weight", "up.weight", "down.weight"))
                if grad.numel():
                    error = float((made[key] - grad).norm() / grad.norm())
                    errors[eight] = max(errors[eight], error)
            assert 0.005 < errors[True] < 0.0155, (name, option)
            assert errors[False] <= (0.004 if name == "bf16" else 0.003), (name, option)


def gradients(policy, option, stock):
    """Of this rank's shards, with weights gathered in FP8 and the stock scatter or ours."""
    model, _ = sharded(FP8Config(opt_level="O1"), policy, model_of(hidden=99))
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if stock:
            module.set_custom_reduce_scatter(DefaultReduceScatter())
        elif option == "divided":  # gloo itself cannot
            module.set_gradient_divide_factor(8.0)
        if option == "summed":
            module.set_force_sum_reduction_for_comms(True)
    micro_batches = 3 if option == "accumulated" else 1
    for i in range(micro_batches):
        model.set_requires_gradient_sync(i == micro_batches - 1)
        loss_of(model, batch(i)).backward()
    return {name: p.grad.to_local().float() for name, p in model.named_parameters()}


@on_ranks(2)
def test_where_gradients_are_missing_the_rest_is_right_and_a_warning_says_so():
    config = FP8Config(opt_level="O1")
    model = Branches()
    convert_to_float8(model, config)
    fully_shard(model)
    connect_fsdp(model, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            model(torch.full((4, 64), 1.0 + RANK)).sum().backward()
    grad = model.left.weight.grad.to_local()
    assert model.right.weight.grad is None
    assert (grad == 6.0).all()  # of 4 * 1 and 4 * 2, the mean
    (warning,) = [str(w.message) for w in caught if "got no gradient" in str(w.message)]
    assert "reduced in BF16" in warning


@on_ranks(2)
def test_gradients_of_8_bits_accumulate_and_are_clipped():
    for micro_batches in (1, 4):
        model, optimizer = trained(FP8Config(opt_level="O3"), BF16)
        plain, _ = trained(FP8Config(opt_level="O2", communication="off"), BF16)
        for i in range(micro_batches):
            for one in (model, plain):
                loss_of(one, batch(i)).backward()
        assert sum(type(p.grad._local_tensor) is Float8Grad for p in model.parameters()) == 4
        norms = [
            float(nn.utils.clip_grad_norm_(one.parameters(), 1e-3).full_tensor())
            for one in (model, plain)
        ]
        clipped = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor())
        optimizer.step()
        assert norms[0] == pytest.approx(norms[1], rel=0.01)
        assert clipped == pytest.approx(1e-3, rel=0.02)


@on_ranks(2)
def test_a_sum_of_many_micro_batches_does_not_fall_short():
    fp32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    policies = {"one": fp32, "sharded": BF16, "whole, float32": fp32, "whole, BF16": BF16}
    exact = []
    cases = [("one", 1), ("sharded", 64), ("whole, float32", 512), ("whole, BF16", 512)]
    for name, count in cases:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(32, 144), nn.LayerNorm(144))
        model, _optimizer = trained(FP8Config(), policies[name], layers)
        if count == 1:
            model.set_custom_reduce_scatter(DefaultReduceScatter())
        retain = count >= 512  # one forward, whose gathered weights stay, is faster
        model.set_reshard_after_backward(not retain)
        loss = None
        for i in range(count):
            model.set_requires_gradient_sync(name == "sharded" or i == count - 1)
            if loss is None or not retain or i == count - 1:
                loss = loss_of(model, batch(0))
            loss.backward(retain_graph=retain)
        model.reshard()
        grads = [p.grad.to_local().double() for p in model.parameters()]
        exact = exact or grads
        pairs = [(grad, of_one * count) for grad, of_one in zip(grads, exact, strict=True)]
        *projections, decibels = worst_sum(pairs)
        assert projections == pytest.approx([1, 1], abs=0.003), (name, count)
        assert decibels >= 30, (name, count)


@on_ranks(4)
def test_shards_of_few_rows_and_of_none():
    """33, 5, 3 and 1 rows on four ranks."""
    for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8"):
        torch.manual_seed(0)
        sizes = (64, 33, 5, 3, 1)
        pairs = list(itertools.pairwise(sizes))
        model, alone = (nn.Sequential(*(nn.Linear(k, n) for k, n in pairs)) for _ in range(2))
        alone.load_state_dict(model.state_dict())
        config = FP8Config(recipe=recipe, opt_level="O1", emulate=True)
        for one in (model, alone):
            for i, layer in enumerate(one):  # also those that convert_to_float8 finds too small
                to_float8(layer, str(i), config, make_recipe(recipe), True)
        fully_shard(model)
        report = connect_fsdp(model, config)
        unshard(model)
        assert report.num_gathers == len(weights_of(model)) == (0 if recipe == "mxfp8" else 4)
        for name, weight in weights_of(model).items():
            layer = alone.get_submodule(name)
            whole = quantize(layer.weight.detach(), layer.fp8.recipe.weight)
            assert torch.equal(whole.qdata.view(torch.uint8), weight.qdata.view(torch.uint8))
            assert torch.equal(whole.scale, weight.rowwise().scale)
        model.reshard()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(RANK))
        model(x).sum().backward()
        everybody = [
            torch.randn(8, 64, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)
        ]
        (alone(torch.cat(everybody)).sum() / RANKS).backward()
        for ours, exact in zip(model.parameters(), alone.parameters(), strict=True):
            whole = ours.grad.full_tensor()
            assert (whole - exact.grad).norm() < 0.06 * exact.grad.norm().clamp(min=1e-9)


@on_ranks(4)
def test_resharding_to_a_number_of_ranks_gathers_as_it_is_and_says_so():
    config = FP8Config(opt_level="O1")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, report = sharded(config, policy, reshard_after_forward=2)
    with count_communication() as count:
        loss_of(model, batch(0)).backward()
    assert (report.num_gathers, report.num_scatters) == (0, 3)
    assert "not '0.weight' and 4 more: reshard_after_forward is an integer" in str(report)
    rows = [(r.kind, r.dtype, r.ranks) for r in count.rows]
    assert ("all-to-all", torch.uint8, 4) in rows
    assert ("all-gather", torch.uint8, 4) not in rows
