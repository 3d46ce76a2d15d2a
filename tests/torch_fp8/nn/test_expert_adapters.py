import copy

import pytest
import torch
from torch import nn

from tests.internals import FactoredAdapter, Factors, multiply_factors, share_equal_weights, sqnr_db
from tests.moe_experts import batch, experts
from tests.saved_activations import count_saved
from torch_fp8 import FP8Config, convert_to_float8, freeze, high_precision, revert, thaw
from torch_fp8.ops.moe_rows import moe_route

FLOOR = 22.0
"""The floor of a block's gradients, see `tests.torch_fp8.nn.test_experts`, less 0.5 dB."""
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


class _Block(nn.Module):
    def __init__(self, layout="plain", **changes):
        super().__init__()
        self.experts = experts(layout, **changes)

    def forward(self, *args):
        return self.experts(*args)


def _adapt(block, rank=4, adapter="default"):
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(target_parameters=TARGETS, r=rank, lora_alpha=8)
    inject_adapter_in_model(config, block, adapter)
    for name, parameter in block.named_parameters():
        if adapter in name:
            nn.init.normal_(parameter, std=0.1)
    return block


def _run(block, *args):
    x, index, scores = args
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    block.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block(x, index, scores)
    generator = torch.Generator().manual_seed(5)
    y.float().backward(torch.randn(y.shape, generator=generator))
    trained = {n: p.grad.clone() for n, p in block.named_parameters() if p.requires_grad}
    return {"y": y.detach(), "x": x.grad, "scores": scores.grad, **trained}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [3, 8])
def test_factors_multiply_as_the_merged_delta_does(transposed, rank):
    num_experts, num_out, num_in = 3, 32, 48
    route = moe_route(torch.tensor([[0], [2], [2], [4]]), num_experts)
    rows = torch.randn(len(route.slot), num_in, requires_grad=True)
    left, right = (num_in, num_out) if transposed else (num_out, num_in)
    lhs = torch.randn(num_experts, left, rank, requires_grad=True)
    rhs = torch.randn(num_experts, rank, right, requires_grad=True)
    y = multiply_factors(rows, route.offs, Factors(lhs, rhs, 0.5), transposed)
    delta = 0.5 * lhs @ rhs
    delta = delta if transposed else delta.transpose(1, 2)
    start, parts = 0, []
    for i, end in enumerate(route.offs.tolist()):
        parts.append(rows[start:end] @ delta[i])
        start = end
    want = torch.cat([*parts, torch.zeros(len(rows) - start, num_out)])
    torch.testing.assert_close(y, want)
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, (rows, lhs, rhs), grad)
    for value, other in zip(torch.autograd.grad(want, (rows, lhs, rhs), grad), got, strict=True):
        torch.testing.assert_close(other, value)


@pytest.mark.parametrize("layout", ["plain", "gpt-oss"])
def test_adapters_train_as_under_peft_alone(layout):
    block, given = _adapt(_Block(layout)), batch(120)
    want = _run(block, *given)
    convert_to_float8(block, FP8Config(frozen_weights="keep"))
    assert sum(isinstance(m, FactoredAdapter) for m in block.modules()) == 2
    got = _run(block, *given)
    assert set(got) == set(want)
    assert any("lora_B" in name for name in got)
    for name, value in want.items():
        assert sqnr_db(value, got[name]) >= FLOOR, name
    assert not hasattr(block.experts.get_base_layer(), "parametrizations")
    again = _run(copy.deepcopy(block), *given)
    assert all(torch.equal(again[name], value) for name, value in got.items())
    revert(block)
    assert not any(isinstance(m, FactoredAdapter) for m in block.modules())
    again = _run(block, *given)
    assert all(torch.equal(again[name], value) for name, value in want.items())


@pytest.mark.parametrize("way", ["high_precision", "evaluation", "decoding"])
def test_adapters_count_where_experts_do_not_run_in_fp8(way):
    block, given = _adapt(_Block()), batch(40)
    want = block(*given)
    convert_to_float8(block, FP8Config(eval_fp8=way != "evaluation", frozen_weights="keep"))
    base = block.experts.get_base_layer()
    if way == "high_precision":
        with high_precision():
            got = block(*given)
    elif way == "evaluation":
        got = block.eval()(*given)
    else:  # as generate on CUDA
        base.config._experts_implementation = "batched_mm"
        got = block(*given)
    assert sqnr_db(want, got) >= (FLOOR if way == "decoding" else 60)
    assert not {"gate_up_proj", "down_proj"} & set(vars(base))


def test_adapters_that_come_after_the_conversion_give_the_same():
    before, given = _Block(), batch(40)
    after = copy.deepcopy(before)
    convert_to_float8(_adapt(before))
    convert_to_float8(after)
    _adapt(after)
    after.load_state_dict(before.state_dict())
    want, got = _run(before, *given), _run(after, *given)
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_several_adapters_add_up_and_merge():
    block, given = _adapt(_Block()), batch(120)
    _adapt(block, adapter="second")
    wrapper = block.experts
    while hasattr(wrapper, "base_layer"):
        wrapper.set_adapter(["default", "second"])
        wrapper = wrapper.base_layer
    want = block(*given)
    convert_to_float8(block, FP8Config(frozen_weights="keep"))
    assert sqnr_db(want, block(*given)) >= FLOOR
    block.experts.merge()
    block.experts.base_layer.merge()
    assert sqnr_db(want, block(*given)) >= FLOOR
    block.experts.unmerge()
    block.experts.base_layer.unmerge()
    assert sqnr_db(want, block(*given)) >= FLOOR


def test_what_is_saved_does_not_grow_with_the_number_of_experts():
    """PEFT keeps a merged copy of each weight; here only the rows of padding are more."""
    totals = []
    for num_experts in (4, 16):
        block = _adapt(_Block(num_experts=num_experts))
        given = batch(256, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with count_saved(block.parameters()) as stock:
                block(*given)
            convert_to_float8(block)
            with count_saved(block.parameters()) as ours:
                block(*given)
        sizes = [p.numel() for p in block.parameters() if p.ndim == 3]
        assert stock.total >= 4 * sum(sizes)
        assert all(t.numel() < min(sizes) // 2 for t in ours.tensors if t.ndim == 3)
        totals.append(ours.total)
    assert totals[1] <= 1.5 * totals[0]


def _frozen(layout="plain"):
    block = _adapt(_Block(layout))
    report = convert_to_float8(block)
    assert len(report.frozen.frozen) == 2
    return block


@pytest.mark.parametrize("layout", ["plain", "gpt-oss"])
def test_frozen_experts_take_one_byte_and_train_adapters(layout):
    block, given = _adapt(_Block(layout)), batch(120)
    want = _run(block, *given)
    report = convert_to_float8(block)
    base = block.experts.get_base_layer()
    assert len(base.frozen_weights) == 2
    assert report.frozen.bytes_after / report.frozen.num_params < 1.1
    assert "2 frozen weights stored in FP8 only" in report.summary()
    got = _run(block, *given)
    assert set(got) == set(want)
    for name, value in want.items():
        assert sqnr_db(value, got[name]) >= FLOOR, name


def test_frozen_experts_are_saved_loaded_copied_and_thawed():
    block, given = _frozen(), batch(40)
    base, want = block.experts.get_base_layer(), block(*given)
    state = copy.deepcopy(block.state_dict())
    assert all(type(value) is torch.Tensor for value in state.values())
    copied = copy.deepcopy(block)
    assert torch.equal(copied(*given), want)
    with torch.no_grad():
        for value in state.values():
            value.mul_(2)
    copied.load_state_dict(state)
    assert not torch.equal(copied(*given), want)
    assert torch.equal(block(*given), want)
    assert torch.equal(block.to(torch.float64).to(torch.float32)(*given), want)
    assert len(base.frozen_weights) == 2
    assert thaw(block) == 2
    assert not base.frozen_weights
    assert sqnr_db(want, block(*given)) > 40  # the second cast of the same values
    assert freeze(block).frozen
    assert torch.equal(block(*given), want)
    revert(block)
    assert type(base.gate_up_proj) is nn.Parameter


def test_frozen_experts_of_two_models_share_memory_until_one_writes():
    policy = _frozen()
    reference = copy.deepcopy(policy)
    base, twin = (block.experts.get_base_layer() for block in (policy, reference))
    assert base.begin_merge("down_proj")
    shared = share_equal_weights([policy, reference])
    assert shared[0] == 2
    base.end_merge(merged=False, name="down_proj")
    for name in ("gate_up_proj", "down_proj"):
        assert getattr(base, name).data_ptr() == getattr(twin, name).data_ptr()
    before = reference(*(given := batch(40)))
    with torch.no_grad():
        base.down_proj.mul_(2)
    assert torch.equal(reference(*given), before)
    assert not torch.equal(policy(*given), before)


def test_adapters_merge_into_frozen_experts_and_out_again():
    import accelerate_fp8  # noqa: F401  # wraps PEFT's merge

    block, given = _frozen(), batch(40)
    base, want = block.experts.get_base_layer(), block(*given)
    codes = base.gate_up_proj.payload.qdata.clone().float()
    for wrapper in (block.experts, block.experts.base_layer):
        wrapper.merge()
    assert not base.frozen_weights
    assert sqnr_db(want, block(*given)) >= FLOOR
    for wrapper in (block.experts, block.experts.base_layer):
        wrapper.unmerge()
    assert torch.equal(base.gate_up_proj.payload.qdata.float(), codes)
    assert torch.equal(block(*given), want)


def test_frozen_experts_thaw_when_somebody_trains_them():
    block = _frozen()
    base = block.experts.get_base_layer()
    with pytest.warns(UserWarning, match="was stored in FP8 only"):
        base.gate_up_proj.requires_grad_(True)
    assert base.gate_up_proj.requires_grad
    assert type(base.gate_up_proj) is nn.Parameter
