import copy
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from tests.internals import (
    OF_TENSOR,
    Float8FrozenWeight,
    FrozenPayload,
    Quantizer,
    freeze_tensor,
    frozen_parameter,
    make_recipe,
)
from tests.steps import through_a_file
from torch_fp8.ops.quantize import dequantize

BLOCKS = make_recipe("blockwise").weight
ONE_SCALE = make_recipe("tensorwise", power_of_two_weights=True).weight
SPECS = pytest.mark.parametrize("spec", [BLOCKS, ONE_SCALE], ids=["blocks", "one scale"])


def frozen(rows=160, cols=200, spec=BLOCKS):
    return frozen_parameter(freeze_tensor(torch.randn(rows, cols), spec, "layer.weight"))


def requantized(x, spec):
    return freeze_tensor(x, spec, "x").quantized


@SPECS
def test_it_takes_one_byte_an_element_and_reads_as_bf16(spec):
    w = torch.randn(256, 384)
    p = frozen_parameter(freeze_tensor(w, spec, "w"))
    assert isinstance(p, nn.Parameter)
    assert not p.requires_grad
    assert p.dtype == torch.bfloat16
    assert p.payload.num_bytes <= 1.02 * w.numel()
    assert type(p + 0) is torch.Tensor
    exact = dequantize(p.payload.quantized)
    assert torch.equal((p + 0).float(), exact), "BF16 holds every value"
    assert (exact - w).norm() / w.norm() < 0.04


@SPECS
def test_quantizing_what_it_reads_as_gives_the_same_values(spec):
    p = frozen(spec=spec)
    again = requantized(p.dequantize(), spec)
    assert torch.equal(dequantize(again), dequantize(p.payload.quantized))


@SPECS
def test_a_copy_of_another_frozen_weight_has_its_scales(spec):
    p = frozen(spec=spec)
    other = frozen_parameter(freeze_tensor(torch.randn(160, 200) * 64, spec, "other"))
    p.copy_(other)
    assert torch.equal(p.qdata.view(torch.uint8), other.qdata.view(torch.uint8))
    assert torch.equal(p.dequantize(), other.dequantize())
    assert p.qdata.data_ptr() != other.qdata.data_ptr()


WRITES = {
    "add_": lambda p, x: p.add_(1.0),
    "data": lambda p, x: p.data.mul_(3.0),
    "view": lambda p, x: p.view(-1)[5:900].fill_(2.0),
    "part": lambda p, x: p[2:7, 11:50].mul_(7.0),
    "itself": lambda p, x: p.add_(p),
    "foreach": lambda p, x: torch._foreach_mul_([p], 2.0),
    "foreach list": lambda p, x: torch._foreach_add_([p], [torch.ones(p.shape)]),
    "out": lambda p, x: torch.mul(torch.ones(p.shape), 4.0, out=p.data),
    "init": lambda p, x: nn.init.constant_(p, 0.25),
    "lerp_": lambda p, x: p.lerp_(x, 0.5),
    "index_copy_": lambda p, x: p.index_copy_(0, torch.tensor([1, 3]), x[:2]),
    "scatter_": lambda p, x: p.scatter_(1, torch.zeros(4, 4, dtype=torch.int64), x),
    "addmm_": lambda p, x: p.addmm_(x[:, :8], x[:8]),
}


@SPECS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_quantized_anew(name, dtype, spec):
    """Averages by ``lerp_`` of a frozen base, in its dtype and in that of the model it was in."""
    p, write = frozen(spec=spec), WRITES[name]
    before = dequantize(p.payload.quantized)
    plain = before.clone()
    x = torch.randn(p.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.no_grad():
        write(p, x)
        write(plain, x.float())
    expected = dequantize(requantized(plain, spec))
    assert p.dtype == torch.bfloat16
    assert torch.equal(dequantize(p.payload.quantized), expected)
    assert not torch.equal(expected, before)


def mix(p, other, alpha):
    """As TRL's `sync_ref_model` writes a reference."""
    p.data.mul_(1.0 - alpha).add_(other, alpha=alpha)


def _by_sum(p, other, alpha):
    p.sub_(other)
    p.mul_(1.0 - alpha)
    p.add_(other)


def _by_foreach(p, other, alpha):
    q = frozen()
    torch._foreach_mul_([p, q], 1.0 - alpha)
    torch._foreach_add_([p, q], [other, torch.randn(q.shape)], alpha=alpha)


MIXES = {
    "mul_ and add_": mix,
    "sub_ and mul_ and add_": _by_sum,
    "_foreach_mul_ and _foreach_add_": _by_foreach,
    "addcmul_": lambda p, other, alpha: p.addcmul_(other - p.float(), torch.tensor(alpha)),
    "lerp_": lambda p, other, alpha: p.lerp_(other, alpha),
    "copy_": lambda p, other, alpha: p.copy_(p.float().lerp(other, alpha)),
    "mul_ and add_ of a view": lambda p, other, alpha: mix(p.view(-1), other.view(-1), alpha),
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize(("change", "told"), [(1e-3, True), (1.0, False)])
def test_a_small_move_by_several_operators_is_lost_with_a_warning(name, change, told):
    """Each operator changes the weight by more than the steps of FP8; their sum does not."""
    p = frozen()
    moves = change * torch.randn(5, 160, 200, generator=torch.Generator().manual_seed(2))
    policy = dequantize(p.payload.quantized)
    stock, start = policy.clone(), policy.clone()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for move in moves:
            policy += move
            MIXES[name](p, policy, 0.6)
            stock.lerp_(policy, 0.6)
    moved = dequantize(p.payload.quantized) - start
    error = (moved - (stock - start)).norm() / (stock - start).norm()
    assert (error > 0.5) == told
    texts = [str(w.message) for w in warned]
    assert bool(texts) == told
    if told:
        assert f"and {name.removesuffix(' of a view')} changed it by less than" in texts[0]


@SPECS
def test_writes_that_fp8_holds_are_quiet(spec):
    p, near = frozen(spec=spec), torch.randn(160, 200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mix(p, torch.randn(p.shape), 0.6)
        mix(p, near, 1.0)
        p.copy_(near + 1e-4)  # what a copy leaves depends on its source alone
        p.data = near
        torch._foreach_copy_([p], [near + 1e-4])
        p.t()[3].zero_()
        p.add_(0.0)


def test_data_of_another_shape_is_refused():
    p = frozen()
    with pytest.raises(RuntimeError, match=r"layer\.weight is stored in FP8 only.*thaw"):
        p.data = torch.zeros(3)


@SPECS
def test_data_that_is_set_leaves_what_an_alias_has(spec):
    p, value = frozen(spec=spec), torch.randn(160, 200)
    before, scale = p.qdata.view(torch.uint8).clone(), p.scale.clone()
    kept, p.data = p.data, value
    assert torch.equal(p.qdata.float(), requantized(value, spec).qdata.float())
    assert torch.equal(kept.qdata.view(torch.uint8), before)
    p.data = kept
    assert torch.equal(p.qdata.view(torch.uint8), before)
    assert torch.equal(p.scale, scale)
    other = frozen(spec=spec)
    other.data = p.data
    assert torch.equal(other.qdata.view(torch.uint8), before)


def test_equal_values_change_no_byte():
    scale = torch.full((2, 2), 0.3)  # as others choose scales: no power of two
    q = torch.randn(160, 200).to(torch.float8_e4m3fn)
    p = frozen_parameter(FrozenPayload(q.clone(), scale.clone(), BLOCKS))
    p.copy_(p.dequantize())
    assert torch.equal(p.qdata.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(p.scale, scale)


def test_a_copy_is_frozen_and_a_pickle_plain():
    p = frozen()
    q = copy.deepcopy(p)
    assert isinstance(q, Float8FrozenWeight)
    assert isinstance(q, nn.Parameter)
    q.zero_()
    assert p.dequantize().any()
    loaded = through_a_file(p, weights_only=True)
    assert type(loaded) is nn.Parameter
    assert torch.equal(loaded, p.dequantize())


def test_code_that_reads_memory_as_bf16_is_refused(tmp_path):
    p = frozen()
    for x in (p, p.data, p[2:7]):
        assert x.data_ptr() == 0
    with pytest.raises(RuntimeError):  # it would read past the bytes
        safetensors.torch.save_file({"weight": p.data}, tmp_path / "weights.safetensors")


def test_training_it_is_refused_by_name():
    p = frozen()
    with pytest.raises(RuntimeError, match=r"layer\.weight.*torch_fp8\.thaw"):
        p.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"layer\.weight.*torch_fp8\.thaw"):
        p.grad = torch.zeros(160, 200)
    p.requires_grad_(False)
    p.grad = None
    assert p.grad is None


def test_a_layer_that_asks_for_other_scales_is_refused_by_name():
    p = frozen(spec=ONE_SCALE)
    with pytest.raises(
        RuntimeError, match=r"layer\.weight is .* with tensorwise scales, but its l"
    ):
        p.quantize(Quantizer(BLOCKS, OF_TENSOR), rowwise=True, columnwise=False)


def test_autograd_goes_through_what_is_read():
    p, x = frozen(), torch.randn(200, requires_grad=True)
    (p.float() @ x).sum().backward()
    assert torch.allclose(x.grad, p.dequantize().float().sum(0), rtol=1e-5, atol=1e-4)
    (p.t().float().norm(dim=0) * x[:160]).sum().backward()


@SPECS
def test_a_collective_writes_it_and_has_its_dtype(spec, single_process_group):
    p, value = frozen(spec=spec), torch.randn(160, 200).bfloat16()
    dist.scatter(p, [value], src=0)
    assert torch.equal(p.dequantize(), dequantize(requantized(value, spec), torch.bfloat16))
