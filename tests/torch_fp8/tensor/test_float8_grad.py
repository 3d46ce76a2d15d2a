import copy
import pickle

import pytest
import torch
from torch import nn

from tests.internals import Float8Grad
from torch_fp8.ops import grad_codec
from torch_fp8.ops.grad_codec import Rounding

SHAPES = [(128, 96), (70, 33), (4, 40, 64), (16, 16, 3, 3), (0, 32)]


def _grad(shape=(128, 96), dtype=torch.bfloat16, size=1.0):
    return Float8Grad.quantize(torch.randn(shape).to(dtype) * size)


def _parameter(grad):
    parameter = nn.Parameter(torch.randn(grad.shape, dtype=grad.dtype))
    parameter.grad = grad
    return parameter


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_takes_a_byte_and_a_thirtysecond_and_keeps_five_bits(shape, dtype):
    x = torch.randn(shape).to(dtype) * 1e-6
    grad = Float8Grad.quantize(x)
    assert (grad.shape, grad.dtype, grad.device) == (x.shape, dtype, x.device)
    assert grad.qdata.dtype == grad.scale.dtype == torch.uint8
    assert grad.qdata.numel() == x.numel()
    assert (grad.float() - x.float()).norm() <= 0.03 * x.float().norm()


READERS = {
    "float": lambda g: g.float(),
    "clone": lambda g: g.clone(),
    "detach": lambda g: g.detach(),
    "data": lambda g: g.data,
    "to": lambda g: g.to(torch.float16),
    "norm": lambda g: g.norm(),
    "norm of one dimension": lambda g: g.norm(dim=0),
    "vector norms": lambda g: torch.stack(
        [torch.linalg.vector_norm(g, p, dtype=torch.float64) for p in (0, 1, 2, float("inf"))]
    ),
    "foreach norm": lambda g: torch._foreach_norm([torch.ones(2), g], 1)[1],
    "isfinite": lambda g: g.isfinite(),
    "element": lambda g: g[3, 5],
    "view": lambda g: g.view(-1, 32),
    "transposed": lambda g: g.t().contiguous(),
    "product": lambda g: g @ g.t(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("clipped", [False, True])
def test_reads_as_a_plain_tensor(read, clipped):
    grad = _grad()
    if clipped:
        grad.mul_(0.3)
    dense = grad.dequantize()
    assert type(dense) is torch.Tensor
    value, expected = read(grad), read(dense)
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
    if value.dtype.is_floating_point and value.ndim < 2:  # sums in another order
        assert torch.allclose(value.double(), expected.double(), rtol=2**-8, atol=0)
    else:
        # float() of a clipped one is more exact than BF16.
        torch.testing.assert_close(value.float(), expected.float(), rtol=2**-8, atol=0)


def test_copies_are_plain_and_aliases_are_not():
    grad = _grad()
    for copied in (grad.clone(), grad.to("cpu", copy=True), grad.contiguous().clone()):
        assert type(copied) is torch.Tensor
    for alias in (grad.detach(), grad.data, grad.view(128, 96), grad.view(-1, 96), grad.cpu()):
        assert type(alias) is Float8Grad
        assert alias.qdata is grad.qdata
    loaded = pickle.loads(pickle.dumps(grad))
    for twin, kind in ((copy.deepcopy(grad), Float8Grad), (loaded, torch.Tensor)):
        assert type(twin) is kind
        assert torch.equal(twin.float(), grad.float())
        twin.zero_()
        assert grad.norm() > 0
    parameter = _parameter(grad)
    assert copy.deepcopy(parameter).grad is None
    assert pickle.loads(pickle.dumps(parameter)).grad is None


def test_a_copy_rounds_as_the_original_would_have():
    x = torch.randn(64, 96)
    first, second = (Float8Grad.quantize(x) for _ in range(2))
    copied = copy.deepcopy(first)
    copied.add_(torch.ones(copied.shape))
    for grad in (first, second):
        grad.add_(torch.full(grad.shape, 0.01))
    assert torch.equal(first.qdata, second.qdata)
    second.add_(x)
    for grad in (first, second):  # one that was set to zero goes on as in a resumed run
        grad.zero_()
        grad.add_(x)
    assert torch.equal(first.qdata, second.qdata)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_norm_moves_the_multiplier_alone(foreach, monkeypatch):
    parameters = [_parameter(_grad(size=s)) for s in (1, 5)] + [nn.Parameter(torch.randn(50))]
    parameters[2].grad = torch.randn(50)
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    for twin, parameter in zip(twins, parameters, strict=True):
        twin.grad = parameter.grad.float().to(parameter.dtype)
    codes = [p.grad.qdata.clone() for p in parameters[:2]]
    monkeypatch.setattr(Float8Grad, "dequantize", None)  # no whole tensor at any time
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
    monkeypatch.undo()
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(twins, 1.0)), rel=0.005)
    for parameter, twin, code in zip(parameters, twins, codes, strict=False):
        assert type(parameter.grad) is Float8Grad
        assert torch.equal(parameter.grad.qdata, code)
        torch.testing.assert_close(parameter.grad.float(), twin.grad.float(), rtol=0.01, atol=1e-6)
    assert torch.nn.utils.get_total_norm([p.grad for p in parameters]) == pytest.approx(1, rel=0.01)


def test_norms_decode_a_few_rows_at_a_time(monkeypatch):
    decoded = []

    def recorded(parts, rows, original=grad_codec.decode_rows):
        value = original(parts, rows)
        decoded.append(value.numel())
        return value

    monkeypatch.setattr(grad_codec, "decode_rows", recorded)
    grad = _grad((2050, 1024))
    grad[-1].fill_(100.0)
    assert float(grad.norm()) == pytest.approx((2049 * 1024 + 1024 * 1e4) ** 0.5, rel=0.01)
    assert decoded[-3:] == [1 << 20] * 2 + [2048]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("bound", [0.7, 0.01, 3e-9])
def test_clipping_by_value_leaves_nothing_beyond(bound, foreach):
    parameter = _parameter(_grad(dtype=torch.float32))
    before = parameter.grad.float()
    torch.nn.utils.clip_grad_value_([parameter], bound, foreach=foreach)
    after = parameter.grad.float()
    assert type(parameter.grad) is Float8Grad
    assert after.abs().max() == torch.tensor(bound)
    torch.testing.assert_close(after, before.clamp(-bound, bound), rtol=0.07, atol=0.02 * bound)
    parameter.grad.clamp_(-bound / 3, 0.9 * bound)
    assert parameter.grad.float().max() == torch.tensor(0.9 * bound)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_visible(value):
    x = torch.randn(8, 64)
    x[2, 40] = value
    grad = Float8Grad.quantize(x)
    assert grad[2, 32:].isnan().all()
    assert grad.isnan().sum() == 32
    assert not grad.isfinite().all()
    grad.add_(torch.ones(8, 64))
    grad.mul_(0.0)
    assert grad.isnan().sum() == 32
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_([_parameter(grad)], 1.0, error_if_nonfinite=True)
    grad.zero_()
    assert grad.norm() == 0
    grad = _grad()
    grad.mul_(torch.tensor(value))
    assert grad.isnan().any()


@pytest.mark.parametrize("bad", ["", "element", "product"])
def test_grad_scaler_unscales_and_checks(bad):
    parameters = [*(_parameter(_grad(size=64.0)) for _ in range(2)), nn.Parameter(torch.zeros(3))]
    parameters[-1].grad = torch.full((3,), 128.0)
    expected = parameters[0].grad.float() / 64
    if bad == "element":
        parameters[0].grad[5, 5] = float("inf")
    elif bad:
        parameters[0].grad.mul_(float("inf"))
    before = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    if not bad:
        torch.testing.assert_close(parameters[0].grad.float(), expected, rtol=1e-6, atol=0)
    assert parameters[-1].grad[0] == 2
    scaler.step(optimizer)
    scaler.update()
    moved = [not torch.equal(p, q) for p, q in zip(parameters, before, strict=True)]
    assert moved == [not bad] * 3
    assert (scaler.get_scale() < 64) == bool(bad)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_stock_optimizers_take_it_for_the_plain_gradient(make):
    parameter = nn.Parameter(torch.randn(128, 96))
    twin = nn.Parameter(parameter.detach().clone())
    optimizer, other = make([parameter]), make([twin])
    for set_to_none in (False, True):
        parameter.grad = _grad(dtype=torch.float32)
        twin.grad = parameter.grad.dequantize()
        before = parameter.grad.float()
        optimizer.step()
        other.step()
        assert torch.equal(parameter, twin)
        assert torch.equal(parameter.grad.float(), before)
        optimizer.zero_grad(set_to_none=set_to_none)
        assert parameter.grad is None if set_to_none else parameter.grad.norm() == 0


WRITES = {
    "product": lambda g, x: g.mul_(x),
    "sum with alpha": lambda g, x: g.add_(x, alpha=-0.5),
    "difference with alpha": lambda g, x: g.sub_(x, alpha=0.5),
    "sum with a row": lambda g, x: g.add_(x[0]),
    "copy": lambda g, x: g.copy_(x),
    "out": lambda g, x: torch.add(x, x, out=g),
    "slice": lambda g, x: g.__setitem__((slice(2, 9), slice(40)), 0.5),
    "flat view": lambda g, x: g.view(-1).mul_(x.view(-1)),
    "view of a view": lambda g, x: g.t()[3].zero_(),
    "data": lambda g, x: g.data.mul_(x),
    "detached": lambda g, x: g.detach().zero_(),
    "product of a list": lambda g, x: torch._foreach_mul_([g, x.clone()], 0.5),
    "sum of a list": lambda g, x: torch._foreach_add_([x.clone(), g], [x, x], alpha=2),
    "zero of a list": lambda g, x: torch._foreach_zero_([g, x.clone()]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writes_reach_it(write):
    grad = _grad(dtype=torch.float32)
    twin, x = grad.dequantize(), torch.randn(128, 96)
    qdata, before = grad.qdata, twin.clone()
    write(grad, x)
    write(twin, x)
    assert grad.qdata is qdata
    assert (twin - before).norm() > 0.01
    assert (grad.float() - twin).norm() <= 0.03 * twin.norm()


def test_products_with_numbers_are_exact_and_move_no_codes():
    grad = _grad()
    codes, before = grad.qdata.clone(), grad.float()
    grad.mul_(0.5)
    grad.mul_(torch.tensor([4.0]))
    grad.div_(torch.tensor(8.0, dtype=torch.bfloat16))
    assert grad.multiplier == 0.25
    assert torch.equal(grad.qdata, codes)
    assert torch.equal(grad.float(), before / 4)
    grad.add_(torch.zeros(128, 96))
    assert grad.multiplier == 1
    assert torch.equal(grad.float(), before / 4)


def test_every_rounding_has_keys_of_its_own():
    ranks = [Rounding(lambda: (1, 2, 3), rank=rank) for rank in (0, 1)]
    keys = [rounding.next() for rounding in ranks for _ in range(100 + rounding.rank)]
    averages = [[rounding.next_exchanged() for _ in range(100)] for rounding in ranks]
    sums = [[rounding.next() for _ in range(3)] for rounding in ranks]
    assert (averages[0], sums[0]) == (averages[1], sums[1])  # the ranks hold equal gradients
    assert len({*keys, *averages[0], *sums[0]}) == 304


def test_a_copy_goes_on_where_the_original_is():
    """Bits that a copy draws again would leave the error of the first rounding twice."""
    pickled = pickle.loads(pickle.dumps(Rounding(lambda: (1, 2), offset=7, rank=1)))
    assert pickled.next() == Rounding(offset=7, rank=1).next() != Rounding().next()
    rounding = Rounding(lambda: (1, 2))
    drawn = [rounding.next(), rounding.next_exchanged(), rounding.next()]
    twin = rounding.copy()
    assert twin.next() == rounding.next() not in drawn
    assert twin.next_exchanged() == rounding.next_exchanged() not in drawn


def test_one_rounding_tells_nothing_of_the_next():
    """Of writes, of sums and of averages, whatever comes after whatever; and a stream repeats."""
    x = torch.full((64, 512), 1.03)
    x[:, ::32] = 8.0
    grad, again = (Float8Grad.quantize(x, Rounding(lambda: (5,))) for _ in range(2))
    assert torch.equal(grad.float(), again.float())
    ups = [grad.float() > x]
    grad.store(x, exchanged=True)
    ups.append(grad.float() > x)
    for _ in range(4):
        grad.qdata.zero_()
        grad.add_(x)
        ups.append(grad.float() > x)
    ups = torch.stack(ups).float()[:, x == 1.03]
    # 1.03 lies at 0.48 between two codes.
    assert ((ups.mean(1) - 0.48).abs() < 0.02).all()
    assert torch.corrcoef(ups).fill_diagonal_(0).abs().max() < 5 / ups.shape[1] ** 0.5


def test_a_shard_rounds_as_the_whole():
    x = torch.randn(64, 96)
    whole = Float8Grad.quantize(x, Rounding(lambda: (7,)))
    shard = Float8Grad.quantize(x[40:], Rounding(lambda: (7,), offset=40 * 96))
    assert torch.equal(whole[40:].clone(), shard.dequantize())


def test_data_that_is_set_leaves_what_an_alias_has():
    parameter = _parameter(_grad())
    alias, before = parameter.grad.data, parameter.grad.clone()
    parameter.grad.data = torch.ones(128, 96, dtype=torch.bfloat16)
    assert (parameter.grad == 1).all()
    assert torch.equal(alias.clone(), before)
    parameter.grad.data = alias
    assert torch.equal(parameter.grad.clone(), before)
    with pytest.raises(RuntimeError, match=r"\(128, 96\).*set to.*\(3,\).*p\.grad = x"):
        parameter.grad.data = torch.ones(3)
