"""`SplitWeight`: what the properties of a float32 Parameter in weight_properties.py leave out."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.internals import (
    HalfWeight,
    Halves,
    SplitShard,
    SplitWeight,
    half,
    hide_weights,
    join_parameter,
    split_parameter,
    stored,
    stored_grad,
)
from tests.steps import through_a_file
from torch_fp8 import revert

SIZE = 64
X, SQUARE = torch.randn(32, SIZE), torch.randn(SIZE, SIZE)


def twins(shape=(SIZE, SIZE)):
    weight = split_parameter(nn.Parameter(torch.randn(shape)))
    return weight, nn.Parameter(weight.detach().clone())


def bits_of(x):
    return x.detach().clone().view(torch.int32)


def same(a, b):
    if isinstance(b, torch.Tensor):
        dtypes = (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = a.detach(), b.detach()
        return dtypes and (torch.equal(a, b) or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))
    if isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    return type(a) is type(b) and a == b


def linear(p):
    layer = nn.Linear(SIZE, SIZE, bias=False)
    layer.weight = p
    return layer


def test_other_libraries_get_a_copy():
    assert SplitWeight.__dlpack__ is not torch.Tensor.__dlpack__  # which would crash the process
    weight, plain = twins()
    weight.grad = SQUARE.bfloat16()
    for x, expected in (
        (weight.detach(), plain),
        (weight.data[3], plain[3]),
        (weight.grad, SQUARE.bfloat16().float()),
    ):
        assert same(torch.from_dlpack(x), expected)
        assert same(torch.from_numpy(np.from_dlpack(x)), expected)
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(weight)


GEOMETRY = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "resize_": lambda x: x.resize_(3, 3),
    "set_": lambda x: x.set_(torch.ones(3, 3)),
    "as_strided_": lambda x: x.as_strided_((3, 3), (1, 3)),
}


@pytest.mark.parametrize("change", GEOMETRY.values(), ids=GEOMETRY)
@torch.no_grad()
def test_another_geometry_in_place_is_refused_and_changes_nothing(change):
    weight, plain = twins()
    for x in (weight, weight.detach(), weight[2:7]):
        with pytest.raises(RuntimeError):
            change(x)
        assert same(weight, plain)


SHAPES = [(SIZE, SIZE), (7, 33), (5,), (1,), (), (0, 4), (3, 37, 61), (4, 3, 3, 3), (1, 4097)]


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_splitting_and_joining_keep_the_object_and_the_bits(shape, bits):
    parameter = nn.Parameter(torch.randn(shape))
    before, parameter.tag = parameter.detach().clone(), "mine"
    known = {parameter: 1}
    assert split_parameter(parameter, bits) is parameter
    assert isinstance(parameter, (SplitWeight, nn.Parameter))
    assert (parameter.shape, parameter.dtype) == (torch.Size(shape), torch.float32)
    assert (parameter.is_leaf, parameter.requires_grad, parameter.tag) == (True, True, "mine")
    assert known[parameter] == 1
    high = parameter.halves.high
    assert torch.equal(high, before.bfloat16()) or bits < 16
    assert sum(x.nbytes for x in parameter.halves.tensors) <= before.numel() * 4
    read = parameter.detach().clone()
    torch.testing.assert_close(read, before, rtol=2.0 ** -(8 + bits), atol=0)
    join_parameter(parameter)
    assert type(parameter) is nn.Parameter
    assert torch.equal(bits_of(parameter), bits_of(read))
    assert parameter.tag == "mine"
    assert not hasattr(parameter, "halves")
    split_parameter(parameter, bits)
    assert torch.equal(bits_of(parameter), bits_of(read))
    join_parameter(parameter)
    join_parameter(parameter)  # a plain one stays
    assert torch.equal(bits_of(parameter), bits_of(read))


def test_the_float32_weight_is_freed():
    parameter = nn.Parameter(torch.randn(SIZE, SIZE))
    memory = StorageWeakRef(parameter.untyped_storage())
    split_parameter(parameter)
    assert memory.expired()
    memory = StorageWeakRef(parameter.halves.high.untyped_storage())
    join_parameter(parameter)
    assert memory.expired()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_odd_shapes_are_read_written_and_settled(shape):
    weight, plain = twins(shape)
    for p in (weight, plain):
        p.mul_(1.0001)
        p.view(-1)[1:].add_(1e-6)
    assert same(weight, plain)
    assert same(weight.sum(), plain.sum())
    assert same(weight.tolist(), plain.tolist())
    weight.halves.settle((1, 2))
    assert weight.halves.bits == 8
    torch.testing.assert_close(weight.detach(), plain.detach(), rtol=2**-15, atol=0)
    assert same(copy.deepcopy(weight), weight)


@torch.no_grad()
def test_a_transposed_parameter():
    parameter = nn.Parameter(torch.randn(33, 7).t())
    before = parameter.detach().clone()
    split_parameter(parameter, 16)
    assert parameter.shape == (7, 33)
    assert torch.equal(parameter, before)
    parameter.mul_(1.0001)
    assert torch.equal(parameter, before * 1.0001)
    parameter.data = (before * 3).t().contiguous().t()
    assert torch.equal(parameter, before * 3)


@torch.no_grad()
def test_settling_is_right_in_the_mean_and_keeps_what_fits():
    values = torch.randn(256, 256)
    weight = split_parameter(nn.Parameter(values.clone()), 16)
    unit = 2.0 ** (values.abs().log2().floor() - 7 - 8)
    total, firsts = torch.zeros(256, 256), []
    for key in range(64):
        halves = Halves(*(x.clone() for x in weight.halves.tensors), 16)
        halves.settle((key, 3))
        assert halves.bits == 8
        error = (halves.join() - values) / unit
        assert error.abs().max() < 1
        total += error
        firsts.append(halves.join())
    assert not torch.equal(*firsts[:2])
    # A uniform remainder's error has the variance 1/6; five standard errors of the mean.
    assert total.mean().abs() < 5 * (64 / 6 / total.numel()) ** 0.5
    assert total.square().mean().item() == pytest.approx(64 / 6, rel=0.05)

    again = Halves(*(x.clone() for x in weight.halves.tensors), 16)
    again.settle((0, 3))
    assert torch.equal(again.join(), firsts[0])
    version = again.version
    again.settle((9, 9))  # nothing to do
    assert torch.equal(again.join(), firsts[0])
    assert again.version == version
    weight.copy_(firsts[0])
    assert weight.halves.bits == 16
    weight.halves.settle((5, 5))
    assert torch.equal(weight, firsts[0])


def tied():
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    model[2].weight = model[0].weight
    for parameter in (model[0].weight, model[1].weight):
        split_parameter(parameter)
    return model


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": through_a_file,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_are_whole_and_those_in_files_plain(copied):
    model = tied()
    model[1].weight.requires_grad_(False)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    other = copied(model)
    cls = SplitWeight if copied is copy.deepcopy else nn.Parameter
    assert type(other[0].weight) is cls
    assert {type(p) for p in other.parameters()} <= {cls, nn.Parameter}
    assert [p.requires_grad for p in other.parameters()] == [True, True, False, True, True]
    assert other[2].weight is other[0].weight
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert same(dict(other.state_dict()), expected)
    for x in (model[0].weight.detach(), model[0].weight[0].detach(), model[0].weight.data):
        alias = copied(x)
        assert type(alias) is torch.Tensor
        assert same(alias, x)
    with torch.no_grad():
        other[0].weight.mul_(1 - 1e-6)
    assert same(other[0].weight, expected["0.weight"] * (1 - 1e-6))


def test_a_joined_copy_lives_as_long_as_the_alias_that_has_its_address():
    weight, _ = twins()
    assert weight.data_ptr() == 0
    alias = weight.detach()
    address = alias.data_ptr()
    assert address != 0
    assert weight.detach().data_ptr() == address
    assert alias.untyped_storage().nbytes() == 4 * weight.numel()
    copy_of_it = weakref.ref(alias._joined)
    del alias
    gc.collect()
    assert copy_of_it() is None


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_module_changes_its_dtype(dtype, with_grad):
    weight, plain = twins()
    layer, stock = linear(weight), linear(plain)
    if with_grad:
        for p in (weight, plain):
            p.grad = SQUARE.bfloat16().float()
    for module in (layer, stock):
        module.to(dtype)
    assert layer.weight is weight
    assert type(weight) is nn.Parameter
    assert same(weight, plain)
    assert (weight.grad is not None) == with_grad
    assert not with_grad or same(weight.grad, plain.grad)
    assert same(layer(X.to(dtype)), stock(X.to(dtype)))
    layer(X.to(dtype)).sum().backward()
    layer.float()
    assert type(weight) is nn.Parameter


def test_a_module_that_stays_stays_split():
    weight, plain = twins()
    layer = linear(weight)
    weight.grad = SQUARE.bfloat16()
    halves = weight.halves
    for module in (layer.float(), layer.cpu(), layer.to("cpu", torch.float32), layer.train()):
        assert module.weight is weight
    assert type(weight) is SplitWeight
    assert same(weight, plain)
    assert weight.halves.high.data_ptr() == halves.high.data_ptr()
    assert same(weight.grad, SQUARE.bfloat16().float())


_WAYS_OUT = {
    "join": lambda layer: join_parameter(layer.weight),
    "revert": revert,
    "bfloat16": lambda layer: layer.to(torch.bfloat16),
    "data": lambda layer: setattr(layer.weight, "data", torch.zeros(2, 2)),
}


@pytest.mark.parametrize("way", _WAYS_OUT)
def test_a_weight_that_is_frozen_after_training_leaves_its_halves(way):
    weight, plain = twins()
    layer, stock = linear(weight), linear(plain)
    before = weight.square().sum()
    for module in (layer, stock):
        module.requires_grad_(False)
        _WAYS_OUT[way](module)
    assert type(weight) is nn.Parameter
    assert weight.dtype == plain.dtype
    assert not weight.requires_grad
    assert same(weight, plain)
    before.backward()
    assert weight.grad is None
    split_parameter(weight := nn.Parameter(SQUARE.clone(), requires_grad=False), 16)
    assert same(weight, SQUARE)


def test_a_gradient_goes_with_the_exchange():
    parameter = nn.Parameter(SQUARE.clone())
    parameter.grad = SQUARE * 3
    split_parameter(parameter)
    assert stored_grad(parameter).dtype == torch.bfloat16
    assert same(parameter.grad, (SQUARE * 3).bfloat16().float())
    join_parameter(parameter)
    assert type(parameter.grad) is torch.Tensor
    assert same(parameter.grad, (SQUARE * 3).bfloat16().float())


def test_the_half_is_bf16_without_a_copy_and_so_is_its_gradient():
    weight, plain = twins()
    assert stored(plain) is plain
    assert stored(weight).data_ptr() == half(weight).data_ptr() == weight.halves.high.data_ptr()
    assert half(weight).dtype == torch.bfloat16
    assert torch.equal(half(weight), weight.halves.high)
    half(weight).square().sum().backward()
    assert stored_grad(weight).dtype == torch.bfloat16
    assert same(weight.grad, (2 * weight.halves.high).float())
    (grad,) = torch.autograd.grad(half(weight).square().sum(), weight)
    assert torch.equal(grad.float(), (2 * weight.halves.high).float())
    weight.requires_grad_(False)
    assert not half(weight).requires_grad


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_that_writes_breaks_its_graph():
    weight, plain = twins()

    def write(p):
        p.mul_(0.999)
        return p.sum()

    with torch.no_grad():
        assert same(torch.compile(write, backend="aot_eager")(weight), write(plain))
    assert same(weight, plain)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"leaves a torch\.compile graph"), torch.no_grad():
        torch.compile(lambda p: p[0], backend="aot_eager")(weight)


@pytest.mark.parametrize("change", [lambda g: g * 2, lambda g: g.mul_(2), lambda g: g.double() * 2])
def test_what_a_hook_returns_becomes_the_gradient(change):
    """A BF16 gradient reads as float32 in the hook; a product of it is float32."""
    layer, x = nn.Linear(SIZE, SIZE, bias=False), torch.randn(4, SIZE)
    weight = split_parameter(layer.weight)
    weight.register_hook(change)
    hide_weights(layer, HalfWeight())
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).float().sum().backward()
    expected = x.bfloat16().float().sum(0).expand(SIZE, SIZE).bfloat16() * 2
    assert stored_grad(weight).dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad, expected.float(), rtol=2**-7, atol=2**-6)


VIEWS = {
    "chunk of a chunk": lambda w: w.chunk(4)[2].chunk(2)[1],
    "row of a slice": lambda w: w[5:][3],
    "slice of a transpose": lambda w: w.t()[7:, 3:],
    "squeezed": lambda w: w.view(8, 8, 64).chunk(8)[3].squeeze(0)[4:],
    "strided": lambda w: w[::2][1:, ::3],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_view_has_its_place_in_memory(name):
    """Writers of files tell by it which tensors overlap."""
    weight, plain = (weight.detach() for weight in twins())
    view, want = VIEWS[name](weight), VIEWS[name](plain)
    assert torch.equal(view, want)
    assert (view.shape, view.stride()) == (want.shape, want.stride())
    assert view.storage_offset() == want.storage_offset()
    assert view.data_ptr() - weight.data_ptr() == want.data_ptr() - plain.data_ptr()
    assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_its_class_makes_parameters_as_stock_does():
    """Code that moves or resizes weights calls ``type(p)(x, requires_grad=...)``."""
    weight, _ = twins()
    for given in ({}, {"requires_grad": False}):
        parameter = type(weight)(torch.ones(3, 5), **given)
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad == given.get("requires_grad", True)


def test_an_address_is_that_of_the_current_values():
    weight = split_parameter(nn.Parameter(torch.randn(8, 8)))
    earlier = weight.detach()
    earlier.data_ptr()
    with torch.no_grad():
        weight.mul_(2)
    for alias in (earlier, weight.detach()):
        joined = torch.empty(0).set_(alias.untyped_storage())
        assert torch.equal(joined, weight.detach().clone().flatten())


def test_a_shard_that_is_copied_keeps_what_was_written():
    padded = torch.zeros(8, 16, dtype=torch.bfloat16)
    shard = SplitShard.of(torch.randn(6, 16), padded)
    with torch.no_grad():
        shard.mul_(1.0001)
    copied = torch.ops.aten._to_copy.default(shard, device=torch.device("cpu"))
    assert copied.halves is not shard.halves
    assert torch.equal(copied.dequantize(), shard.dequantize())
