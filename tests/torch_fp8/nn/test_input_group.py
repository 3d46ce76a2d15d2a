"""Layers that read one input and share one dgrad and one wgrad: values, counts, exceptions."""

import copy
import functools
import pickle
import threading
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.internals import CastOptions, sqnr_db
from tests.steps import assert_equal, gaussian, train
from tests.torch_fp8.block_models import MLP, Block, Norm
from torch_fp8 import (
    Float8Linear,
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    high_precision,
    memory_report,
)
from torch_fp8.distributed import connect_ddp, ddp_options
from torch_fp8.ops import scaled_mm
from torch_fp8.ops.quantize import dequantize, quantize_layouts

SIZE = 128


class Readers(nn.Module):
    """Three layers of different widths; the last two have a bias."""

    def __init__(self, size=SIZE):
        super().__init__()
        self.query = nn.Linear(size, 2 * size, bias=False)
        self.key, self.value = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        return torch.cat([self.query(x), self.key(x), self.value(x)], -1)


class Gated(MLP):
    """The group is gate and up, whose gradients SwiGLU's backward writes."""

    def __init__(self):
        super().__init__(SIZE, 2 * SIZE)


def _members(readers):
    names = ("gate_proj", "up_proj") if readers is Gated else ("query", "key", "value")
    return tuple(f"readers.{name}" for name in names)


both_groups = pytest.mark.parametrize("readers", [Readers, Gated])


class Model(nn.Module):
    def __init__(self, readers=Readers, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.readers = Norm(SIZE), readers()
        self.to(dtype)

    def forward(self, x):
        return self.readers(self.norm(x))


class Checkpointed(nn.Module):
    def __init__(self, model, **options):
        super().__init__()
        self.__dict__["model"], self.options = model, options

    def named_parameters(self, *args, **kwargs):
        return self.model.named_parameters()

    def forward(self, x):
        return checkpoint(self.model, x, **self.options)


def _separate(model):
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.fp8.group = None


def _converted(grouped=True, recipe="tensorwise", readers=Readers, dtype=torch.bfloat16):
    model = Model(readers, dtype)
    report = convert_to_float8(model, FP8Config(recipe=recipe, opt_level="O1"))
    assert report.groups == (_members(readers if readers is Gated else Readers),)
    if not grouped:
        _separate(model)
    return model


@pytest.fixture
def products(monkeypatch):
    """The shapes (R, S) of all products."""
    shapes, multiply = [], scaled_mm._multiply

    def noted(a, b, *options):
        shapes.append((a.qdata.shape[0], b.qdata.shape[0]))
        return multiply(a, b, *options)

    monkeypatch.setattr(scaled_mm, "_multiply", noted)
    return shapes


def _gradients(outputs, seed=3):
    return [gaussian(*y.shape, seed=seed + i) * 4.0**i for i, y in enumerate(outputs)]


# Products and values.


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize(
    ("recipe", "forward", "backward"),
    [("tensorwise", 7, 8), ("blockwise", 7, 14), ("delayed", 7, 14), ("rowwise", 7, 14)],
)
def test_a_block_has_fifteen_products(level, recipe, forward, backward, products):
    model, config = Block(SIZE, 2 * SIZE), FP8Config(recipe=recipe, opt_level=level)
    report = convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters())
    if level != "O1":
        convert_optimizer(optimizer, config, model=model)
    for _ in range(2):
        products.clear()
        loss = model(gaussian(2, 16, SIZE, dtype=torch.float32).requires_grad_()).sum()
        assert len(products) == forward
        loss.backward()
        assert len(products) == forward + backward
        optimizer.step()
        optimizer.zero_grad()
    line = "grouped   1 group of 2, 1 group of 3 layers that read one input"
    assert (line in str(report)) == (backward == 8)


def test_gradients_of_gate_and_up_are_as_good_as_those_of_layers_apart():
    exact = Model(Gated, torch.float64)
    models = [_converted(grouped, readers=Gated) for grouped in (True, False)]
    exact.load_state_dict(models[0].state_dict())
    got = []
    for model in (exact, *models):
        x = gaussian(2, 96, SIZE).to(next(model.parameters()).dtype)
        _, grad_input, grads = train(model, x)
        got.append([grad_input, *grads.values()])
    for want, grouped, apart in zip(*got, strict=True):
        slack = 0.15 if want.ndim > 1 else 0.3
        assert sqnr_db(want, grouped) > sqnr_db(want, apart) - slack


@pytest.mark.parametrize("recipe", ["tensorwise"])
def test_gradients_are_as_good_as_those_of_layers_apart(recipe):
    """BF16 gradients that differ by 16 times: their sum is rounded once, not twice."""
    exact = Model(dtype=torch.float64)
    models = [_converted(grouped, recipe) for grouped in (True, False)]
    exact.load_state_dict(models[0].state_dict())
    got = []
    for model in (exact, *models):
        x = gaussian(2, 96, SIZE).to(next(model.parameters()).dtype).requires_grad_()
        outputs = model(x).split([2 * SIZE, SIZE, SIZE], -1)
        torch.autograd.backward(outputs, [g.to(x.dtype) for g in _gradients(outputs)])
        got.append([x.grad, *(p.grad for p in model.parameters())])
    for want, grouped, apart in zip(*got, strict=True):
        # A scale's fraction moves the points to which values round; a vector has few elements.
        slack = 0.15 if want.ndim > 1 else 0.3
        assert sqnr_db(want, grouped) > sqnr_db(want, apart) - slack


def test_a_group_casts_gradients_and_weights_as_one_matrix():
    model = _converted()
    x, readers = gaussian(48, SIZE).requires_grad_(), model.readers
    readers.key.weight.data.mul_(3)  # not the first, nor the last
    normed = model.norm(x)
    normed.retain_grad()
    outputs = [layer(normed) for layer in readers.children()]
    grads = _gradients(outputs)
    torch.autograd.backward(outputs, grads)
    recipe = readers.query.fp8.recipe

    def payloads(matrix, spec):
        options = CastOptions.of(spec, None, rowwise=True, columnwise=True)
        return [dequantize(x) for x in quantize_layouts(matrix, options)]

    g, g_t = payloads(torch.cat(grads, 1), recipe.grad_output)
    _, w = payloads(
        torch.cat([layer.weight.detach() for layer in readers.children()]), recipe.weight
    )
    _, x_t = payloads(normed.dequantize(), recipe.input)
    assert sqnr_db(g @ w.t(), normed.grad) > 45  # the only other rounding is that of BF16
    weights = torch.cat([layer.weight.grad for layer in readers.children()])
    assert sqnr_db(g_t @ x_t.t(), weights) > 45
    sums = [g.float().sum(0) for g in grads]
    assert torch.equal(readers.key.bias.grad, sums[1].bfloat16())
    assert torch.equal(readers.value.bias.grad, sums[2].bfloat16())


class Observer:
    """A monitor that notes the operands of backward."""

    def __init__(self):
        self.seen = None

    def weight(self, *args):
        pass

    input = weight

    def backward(self, *args):
        self.seen = args


@pytest.mark.parametrize("recipe", ["tensorwise"])
def test_the_monitor_of_a_layer_sees_its_part_of_the_operands(recipe):
    model = _converted(recipe=recipe)
    observers = [Observer() for _ in range(3)]
    for layer, observer in zip(model.readers.children(), observers, strict=True):
        layer.fp8.observe(observer)
    model(gaussian(256, SIZE).requires_grad_()).square().sum().backward()
    for layer, observer in zip(model.readers.children(), observers, strict=True):
        grad, row, col, weight, weight_col = observer.seen
        assert sqnr_db(grad.float(), dequantize(row)) > 24
        assert sqnr_db(grad.float().t(), dequantize(col)) > 24
        assert weight is layer.weight
        assert sqnr_db(weight.float().t(), dequantize(weight_col)) > 30


@both_groups
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_any_number_of_tokens_works(tokens, readers):
    got = [
        train(_converted(grouped, readers=readers), gaussian(tokens, SIZE))
        for grouped in (True, False)
    ]
    assert torch.equal(got[0][0], got[1][0])
    for name, grad in got[0][2].items():
        assert grad.shape == got[1][2][name].shape
        assert tokens == 0 or sqnr_db(got[1][2][name], grad) > 20


def test_a_gradient_that_is_not_finite_stays_visible():
    model = _converted()
    y = model(gaussian(32, SIZE).requires_grad_())
    grad = torch.ones_like(y)
    grad[3, -1] = torch.nan
    y.backward(grad)
    assert model.readers.value.weight.grad.isnan().any()
    assert model.norm.weight.grad.isnan().any()


# Outputs and gradients are like those of stock layers.


def test_outputs_are_tensors_of_their_own():
    model = _converted()
    normed = model.norm(gaussian(2, 8, SIZE).requires_grad_())
    query, key = model.readers.query(normed), model.readers.key(normed)
    for y in (query, key):
        assert y.is_contiguous()
        assert not y._is_view()
        assert y.view(-1, 16).shape[1] == 16
    key.mul_(2).view(-1, 16).add_(1)
    query.sum().backward()
    assert model.readers.key.weight.grad is None


def test_gradients_can_be_written_one_by_one():
    model = _converted()
    model(gaussian(32, SIZE).requires_grad_()).sum().backward()
    grads = [layer.weight.grad for layer in model.readers.children()]
    before = [grad.clone() for grad in grads]
    assert all(grad.is_contiguous() and not grad._is_view() for grad in grads)
    grads[1].zero_()
    assert torch.equal(grads[0], before[0])
    assert torch.equal(grads[2], before[2])


def test_an_output_written_in_place_has_the_right_gradient():
    got = []
    for grouped in (True, False):
        model = _converted(grouped)
        normed = model.norm(gaussian(32, SIZE).requires_grad_())
        outputs = [layer(normed) for layer in model.readers.children()]
        outputs[1].mul_(0.5)
        torch.autograd.backward(outputs, _gradients(outputs))
        got.append(model.readers.key.weight.grad)
    assert sqnr_db(got[1], got[0]) > 20


# Which layers take part.


def test_a_layer_that_is_not_called_has_no_gradient(products):
    model = _converted()
    normed = model.norm(gaussian(32, SIZE).requires_grad_())
    y = model.readers.query(normed) + 0
    unused = model.readers.key(normed)
    products.clear()
    y.sum().backward()
    assert len(products) == 2
    assert unused.requires_grad
    assert model.readers.query.weight.grad is not None
    assert model.readers.key.weight.grad is None
    assert model.readers.value.weight.grad is None


def test_a_layer_that_is_not_called_may_be_written_to():
    """Backward does not read it, and would refuse what has changed since forward."""
    model = _converted()
    normed = model.norm(gaussian(32, SIZE).requires_grad_())
    outputs = model.readers.query(normed), model.readers.key(normed)
    model.readers.value.weight.data.zero_()
    with torch.no_grad():
        model.readers.value.weight.add_(1)
    torch.autograd.backward(outputs, _gradients(outputs))
    assert model.readers.key.weight.grad is not None
    model.readers.key.weight.grad = None
    outputs = [layer(model.norm(gaussian(32, SIZE))) for layer in model.readers.children()]
    with torch.no_grad():
        model.readers.value.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, _gradients(outputs))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_hook_of_a_weight_without_gradient_is_not_called(level):
    model, config, seen = Model(dtype=torch.float32), FP8Config(opt_level=level), []
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters())
    if level == "O2":
        convert_optimizer(optimizer, config, model=model)
    for layer in model.readers.children():
        layer.weight.register_hook(lambda grad: seen.append(grad.shape))
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    normed = model.norm(gaussian(32, SIZE, dtype=torch.float32).requires_grad_())
    model.readers.query(normed).sum().backward()
    assert seen == [model.readers.query.weight.shape] * 2


def test_the_second_call_of_a_layer_has_a_backward_of_its_own():
    got = []
    for grouped in (True, False):
        model = _converted(grouped)
        normed = model.norm(gaussian(32, SIZE).requires_grad_())
        layers = [*model.readers.children(), model.readers.key]
        outputs = [layer(normed) for layer in layers]
        torch.autograd.backward(outputs, _gradients(outputs))
        got.append([layer.weight.grad for layer in model.readers.children()])
        assert torch.equal(outputs[1], outputs[3])
    for one, other in zip(*got, strict=True):
        assert sqnr_db(other, one) > 20


def _freeze(layer):
    layer.weight.requires_grad_(False)


def _replace_input(layer):
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 0,))


def _clamp(layer):
    def write(module, args):
        with torch.no_grad():
            module.weight.clamp_(-0.05, 0.05)

    layer.register_forward_pre_hook(write)


def _watch_gradients(layer):
    layer.register_full_backward_hook(lambda module, grad_input, grad_output: None)


@pytest.mark.parametrize(
    ("change", "backward"),
    [(_freeze, 2 + 1), (_replace_input, 2 + 2), (_clamp, 2 + 2), (_watch_gradients, 2 + 2)],
)
def test_others_share_when_a_layer_leaves(change, backward, products):
    got = []
    for grouped in (True, False):
        model = _converted(grouped)
        change(model.readers.key)
        y = model(gaussian(32, SIZE).requires_grad_())
        products.clear()
        y.backward(gaussian(*y.shape, seed=2))
        if grouped:
            assert len(products) == backward
        got.append({n: p.grad for n, p in model.named_parameters()})
    for name, grad in got[1].items():
        assert (grad is None) == (got[0][name] is None), name
        assert grad is None or sqnr_db(grad, got[0][name]) > 20, name


class Adapted(nn.Module):
    """A frozen layer beside which two small ones are trained."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.a = nn.Linear(SIZE, 4, bias=False, dtype=torch.bfloat16)
        self.b = nn.Linear(4, base_layer.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


def _adapt(model):
    name = _members(type(model.readers))[1].removeprefix("readers.")
    setattr(model.readers, name, Adapted(getattr(model.readers, name)))
    return model


def _offload(model):
    forward = model.forward

    def offloaded(x):
        with torch.autograd.graph.save_on_cpu():
            return forward(x)

    model.forward = offloaded
    return model


def _override(value):
    return lambda member: {"overrides": {member: value}}


def _frozen(member):
    return {"opt_level": "O2", "frozen_weights": "fp8"}


OPTIONS = {
    "as it is": (None, None, None, (2, 4)),
    "a frozen member with an adapter": (None, _adapt, None, (2 + 1, 2 + 1 + 2)),
    "a member of another recipe": (_override({"recipe": "rowwise"}), None, None, (6, 6)),
    "a member in BF16": (_override(None), None, None, (2, 2 + 2)),
    "frozen FP8 weights": (_frozen, lambda model: model.requires_grad_(False), None, (3, 3)),
    "offloaded": (None, None, _offload, (2, 4)),
    "checkpointed": (None, None, functools.partial(Checkpointed, use_reentrant=False), (2, 3 + 4)),
}
"""Options, given the second member; changes of the stock model and of the converted one; products
of backward of three layers, and of a gated MLP.
"""


@both_groups
@pytest.mark.parametrize("case", OPTIONS)
def test_each_option_gives_the_gradients_of_layers_apart(case, readers, products):
    options, change, run, counts = OPTIONS[case]
    results = []
    for grouped in (True, False):
        model = Model(readers)
        model = change(model) if change else model
        more = options(_members(readers)[1]) if options else {}
        config = FP8Config(**{"recipe": "tensorwise", "opt_level": "O1", **more})
        convert_to_float8(model, config)
        if not grouped:
            _separate(model)
        parameters = dict(model.named_parameters())
        x = gaussian(48, SIZE).requires_grad_()
        y = (run(model) if run else model)(x)
        products.clear()
        y.backward(gaussian(*y.shape, seed=2))
        if grouped:
            assert len(products) == counts[readers is Gated]
        results.append({"x": x.grad, **{name: p.grad for name, p in parameters.items()}})
    for name, grad in results[1].items():
        assert (grad is None) == (results[0][name] is None), name
        assert grad is None or sqnr_db(grad, results[0][name]) > 20, name


def test_a_hook_of_a_layer_sees_the_gradient_of_its_own_input():
    model, seen = _converted(), []
    model.readers.key.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0], go[0])))
    y = model(gaussian(32, SIZE).requires_grad_())
    y.backward(gaussian(*y.shape, seed=2))
    ((grad_input, grad_output),) = seen
    want = grad_output.float() @ model.readers.key.weight.float()
    assert sqnr_db(want, grad_input) > 20


def test_an_input_without_gradient_leaves_layers_apart(products):
    """Each output can then be differentiated in a backward of its own."""
    model = _converted()
    model.norm.weight.requires_grad_(False)
    normed = model.norm(gaussian(32, SIZE))
    outputs = [layer(normed) for layer in model.readers.children()]
    products.clear()
    for y in outputs:
        y.sum().backward()
    assert len(products) == 3


def test_another_autocast_state_leaves_a_layer_apart(products):
    model = _converted(dtype=torch.float32)
    normed = model.norm(gaussian(32, SIZE, dtype=torch.float32).requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        query, key = model.readers.query(normed), model.readers.key(normed)
    value = model.readers.value(normed)
    assert [y.dtype for y in (query, key, value)] == [torch.bfloat16] * 2 + [torch.float32]
    products.clear()
    (query.sum() + key.sum() + value.sum()).backward()
    assert len(products) == 2 + 2
    assert all(p.grad is not None for p in model.parameters())


def test_a_recipe_that_changes_between_calls_leaves_a_layer_apart(products):
    model = _converted()
    normed, key = model.norm(gaussian(32, SIZE).requires_grad_()), model.readers.key
    outputs = [model.readers.query(normed)]
    key.run_forward(replace(key.fp8.recipe, bf16_forward=True))
    outputs += [key(normed), model.readers.value(normed)]
    products.clear()
    sum(y.sum() for y in outputs).backward()
    assert len(products) == 2 + 2


class Crossed(Readers):
    """Key and value read another tensor than query, as in a decoder."""

    def __init__(self, memory):
        super().__init__()
        self.outer, self.memory = Norm(SIZE), memory

    def forward(self, x):
        memory = self.memory(self.outer(x.flip(0)))
        return torch.cat([self.query(x), self.key(memory), self.value(memory)], -1)


def _result_of_a_norm(x):
    return x


def _dropped_out(x):
    return x + x.roll(1, 0)  # any result, but without random numbers


crossed = pytest.mark.parametrize("memory", [_result_of_a_norm, _dropped_out])


@crossed
def test_key_and_value_of_another_input_share_their_backward(products, memory):
    got = []
    for grouped in (True, False):
        model = Model(functools.partial(Crossed, memory))
        convert_to_float8(model, FP8Config())
        if not grouped:
            _separate(model)
        y = model(gaussian(32, SIZE).requires_grad_())
        products.clear()
        y.backward(gaussian(*y.shape, seed=2))
        assert len(products) == (2 + 2 if grouped else 6)
        got.append({n: p.grad for n, p in model.named_parameters()})
    for name, grad in got[1].items():
        assert sqnr_db(grad, got[0][name]) > 20, name


def test_readers_of_a_tensor_see_what_is_written_to_it_between_them(products):
    model, got = _converted(), []
    for grouped in (True, False):
        if not grouped:
            _separate(model)
        memory = gaussian(32, SIZE).requires_grad_() * 1
        outputs = [model.readers.key(memory)]
        memory.mul_(2)
        outputs += [model.readers.value(memory)]
        products.clear()
        sum(y.sum() for y in outputs).backward()
        assert len(products) == 4
        got.append(outputs)
    for one, other in zip(*got, strict=True):
        assert torch.equal(one, other)


def test_a_tensor_that_a_layer_has_read_is_freed_with_its_casts():
    model, x = _converted(), gaussian(32, SIZE).requires_grad_()
    memory = x * 1
    y = model.readers.key(memory) + model.readers.value(memory)
    stays = weakref.ref(memory.fp8_shared[1].production)
    del memory
    assert stays() is None
    model.readers.key(x)
    assert not hasattr(x, "fp8_shared"), "a leaf would keep itself alive"
    y.sum().backward()


def test_a_weight_that_is_replaced_between_calls_counts():
    model = _converted()
    normed = model.norm(gaussian(32, SIZE).requires_grad_())
    query, old = model.readers.query(normed), model.readers.key.weight
    model.readers.key.weight = nn.Parameter(torch.zeros_like(old))
    model.readers.key.bias.data.zero_()
    key = model.readers.key(normed)
    assert not key.any()
    (query.sum() + key.sum()).backward()
    assert old.grad is None
    assert model.readers.key.weight.grad is not None


def test_tied_layers_add_their_gradients():
    got = []
    for grouped in (True, False):
        model = _converted(grouped)
        model.readers.key.weight = model.readers.value.weight
        y = model(gaussian(32, SIZE).requires_grad_())
        y.backward(gaussian(*y.shape, seed=2))
        got.append(model.readers.key.weight.grad)
    assert sqnr_db(got[1], got[0]) > 20


# Passes, copies and threads.


def test_a_checkpoint_may_call_the_layers_in_another_order():
    class Turning(Readers):
        calls = 0

        def forward(self, x):
            self.calls += 1
            layers = [self.query, self.key, self.value]
            order = (0, 1, 2) if self.calls % 2 else (2, 0, 1)
            outputs = {i: layers[i](x) for i in order}
            return torch.cat([outputs[i] for i in range(3)], -1)

    x = gaussian(32, SIZE)
    want, model = train(_converted(readers=Turning), x), _converted(readers=Turning)
    assert_equal(want, train(Checkpointed(model, use_reentrant=False), x))
    model = _converted(readers=Turning)
    assert_equal(want, train(Checkpointed(model, use_reentrant=True), x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_groups_of_its_own(copied):
    model = _converted()
    twin = copied(model)
    (group,) = twin.norm.fp8.groups
    assert group.layers == tuple(twin.readers.children())
    assert all(layer.fp8.group() is group for layer in group.layers)
    assert copied(model.readers.key).fp8.group is None
    x = gaussian(32, SIZE)
    assert_equal(train(model, x), train(twin, x))


def test_models_that_were_converted_apart_have_their_own_groups():
    """Their layers had the same names."""
    models = nn.ModuleList(_converted() for _ in range(2))
    report = convert_to_float8(models, FP8Config(opt_level="O1"))
    assert len(report.groups) == 2
    for model in models:
        (group,) = model.norm.fp8.groups
        assert group.layers == tuple(model.readers.children())


def test_a_forward_without_gradients_leaves_nothing_behind():
    model, x = _converted(), gaussian(32, SIZE)
    want = train(_converted(), x)
    normed = model.norm(x.requires_grad_())
    with torch.no_grad():
        model.readers(normed)
    assert normed.reads is None
    y = model.readers(normed)
    y.backward(gaussian(*y.shape, dtype=torch.float32, seed=2).to(y.dtype))
    assert torch.equal(y, want[0])
    assert model.readers.key.weight.grad is not None


def test_nothing_outlives_a_forward():
    model = _converted()
    normed = model.norm(gaussian(32, SIZE).requires_grad_())
    y = model.readers(normed)
    stays = weakref.ref(normed)
    del normed
    assert stays() is None
    y.sum().backward()


def test_two_threads_compute_as_one():
    model = _converted()
    inputs = [gaussian(32, SIZE, seed=i) for i in range(2)]
    want, got = [], [None, None]
    for x in inputs:
        x = x.clone().requires_grad_()
        want.append(torch.autograd.grad(model(x).sum(), x)[0])

    def run(i):
        for _ in range(5):
            x = inputs[i].clone().requires_grad_()
            got[i] = torch.autograd.grad(model(x).sum(), x)[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, want, got))


def test_second_derivatives_are_right_or_refused():
    model = _converted(dtype=torch.float32)
    x = gaussian(8, SIZE, dtype=torch.float32).requires_grad_()
    normed = model.norm(x)
    y = sum(layer(normed).square().sum() for layer in model.readers.children())
    with pytest.raises(RuntimeError, match=r"torch_fp8\.high_precision"):
        torch.autograd.grad(y, [model.readers.key.weight], create_graph=True)
    with high_precision():
        normed = model.norm(x)
        y = sum(layer(normed).square().sum() for layer in model.readers.children())
        torch.autograd.grad(y, [model.readers.key.weight], create_graph=True)


def test_two_losses_of_one_graph_add_up():
    model = _converted()
    normed = model.norm(gaussian(32, SIZE).requires_grad_())
    query, key, _ = (layer(normed) for layer in model.readers.children())
    query.sum().backward(retain_graph=True)
    alone = model.readers.query.weight.grad.clone()
    assert model.readers.key.weight.grad is None
    key.sum().backward()
    assert torch.equal(model.readers.query.weight.grad, alone)
    assert model.readers.key.weight.grad is not None


class Choosing(Readers):
    def forward(self, x):
        return torch.cat([self.query(x), self.key(x)], -1)


@pytest.fixture
def one_rank(tmp_path):
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_ddp_finds_layers_that_are_not_called():
    model = _converted(readers=Choosing)
    ranks = DistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(2):
        ranks(gaussian(32, SIZE)).sum().backward()
    assert model.readers.value.weight.grad is None
    assert model.readers.key.weight.grad is not None


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize(("readers", "backward"), [(Choosing, 2), (Gated, 2 + 2)])
def test_our_reducer_averages_layers_that_share_their_backward(level, readers, backward, products):
    model, config = Model(readers, torch.float32), FP8Config(opt_level=level)
    convert_to_float8(model, config)
    called, uncalled = model.readers.get_submodule(_members(readers)[1][8:]), None
    if readers is Choosing:
        uncalled = model.readers.value
        uncalled.bias.requires_grad_(False)  # DDP would wait for it
    optimizer = torch.optim.AdamW(model.parameters())
    convert_optimizer(optimizer, config, model=model)
    ranks = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
    connect_ddp(ranks, [optimizer], config)
    for _ in range(2):
        loss = ranks(gaussian(32, SIZE, dtype=torch.float32)).sum()
        products.clear()
        loss.backward()
        assert len(products) == backward
        assert uncalled is None or uncalled.weight.grad is None
        assert called.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("one_rank")
@both_groups
@pytest.mark.parametrize("in_unit", [True, False])
def test_layers_in_one_unit_of_fsdp2_share_their_backward(readers, in_unit, products):
    """A layer that FSDP2 gathers by itself leaves: the first member would need its weight early."""
    mesh, got = init_device_mesh("cpu", (1,)), []
    for grouped in (True, False):
        model = _converted(grouped, readers=readers)
        for module in () if in_unit else model.readers.children():
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        y = model(gaussian(32, SIZE).requires_grad_())
        products.clear()
        y.backward(gaussian(*y.shape, seed=2))
        down = 2 if readers is Gated else 0
        assert len(products) == (2 + down if grouped and in_unit else 6)
        got.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    for name, grad in got[1].items():
        assert sqnr_db(grad, got[0][name]) > 20, name


# The order in which gradients arrive.


@pytest.mark.parametrize("late", [0, 1])
def test_gradients_that_arrive_late_have_products_of_their_own(late, products):
    """Another device may be slower than the one that has multiplied the others' gradients."""
    model = _converted()
    x = gaussian(32, SIZE).requires_grad_()
    want = torch.autograd.grad(_output_sum(model, x), [x, *model.parameters()])
    outputs = [layer(normed) for normed in [model.norm(x)] for layer in model.readers.children()]
    exchange = outputs[0].grad_fn.exchange

    def multiply(grad):
        for gradients in exchange.arrived():
            gradients.payloads()

    outputs[late].register_hook(multiply)
    products.clear()
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    got = [x.grad, *(p.grad for p in model.parameters())]
    assert len(products) == 4
    assert all(sqnr_db(w, g) > 25 for w, g in zip(want, got, strict=True))
    assert not exchange.passes


def _output_sum(model, x):
    return model(x).float().sum()


@pytest.mark.parametrize("needed", ["input", "weight", "bias"])
def test_gradients_that_nobody_needs_are_not_computed(needed, products):
    model = _converted()
    x, (query, key, value) = gaussian(32, SIZE).requires_grad_(), model.readers.children()
    normed = model.norm(x)
    outputs = [layer(normed) for layer in (query, key, value)]
    inputs = {"input": x, "weight": key.weight, "bias": key.bias}
    products.clear()
    (grad,) = torch.autograd.grad(outputs, inputs[needed], _gradients(outputs))
    assert len(products) == 1
    assert grad.any()
    assert not outputs[0].grad_fn.exchange.passes, "nothing waits for the others"


# Graphs.


@both_groups
@pytest.mark.parametrize("scales", ["current", "last_step"])
def test_a_graph_shares_backward_products(scales, readers):
    """With the last step's scales, the first member's slots record the cast of all gradients."""
    model = Model(readers, dtype=torch.float32)
    members = [model.get_submodule(name) for name in _members(readers)]
    config = FP8Config(graph_scales=scales)
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters())
    convert_optimizer(optimizer, config, model=model)
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        names = [str(node.target) for node in graph.graph.nodes]
        graphs.append(sum("scaled_mm" in name for name in names))
        assert readers is not Gated or not any("cat" in name.split(".") for name in names)
        return make_boxed_func(graph)

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    for _ in range(3):
        x = gaussian(32, SIZE, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = compiled(x)
        y.float().square().sum().backward()
        grads = {n: p.grad.float() for n, p in model.named_parameters()}
        slots = [member.fp8_grad_amax for member in members if scales == "last_step"]
        assert [bool(slot) for slot in slots] == [True, False, False][: len(slots)]
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(x).float().square().sum().backward()
        least = 15 if readers is Gated else 20  # a gradient of gate has been rounded three times
        for name, parameter in model.named_parameters():
            assert sqnr_db(parameter.grad.float(), grads[name]) > least, name
        optimizer.step()
        optimizer.zero_grad()
    assert graphs[-2:] == ([3, 4] if readers is Gated else [3, 2])


@crossed
def test_a_graph_shares_the_products_of_any_readers_of_one_tensor(memory):
    model = Model(functools.partial(Crossed, memory))
    convert_to_float8(model, FP8Config())
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(sum("scaled_mm" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph)

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    compiled(gaussian(32, SIZE).requires_grad_()).square().sum().backward()
    assert graphs == [3, 2 + 2]


# Levels and optimizers.


def _trained(grouped, readers, seed=3, **options):
    model, config = Model(readers, dtype=torch.float32), FP8Config(**options)
    convert_to_float8(model, config)
    if not grouped:
        _separate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    convert_optimizer(optimizer, config, model=model)
    inputs = []
    for step in range(3):
        x = gaussian(64, SIZE, dtype=torch.float32, seed=seed + step).requires_grad_()
        for part in x.split(32):  # two micro-batches
            model(part).square().mean().backward()
            if options.get("gradient_release"):
                break
        inputs.append(x.grad)
        optimizer.step()
        optimizer.zero_grad()
    return [*inputs, *(p.detach().float() for p in model.parameters())]


@pytest.mark.parametrize(
    "options",
    [{"opt_level": "O2"}, {"opt_level": "O3"}, {"opt_level": "O3", "gradient_release": True}],
    ids=["O2", "O3", "release"],
)
@both_groups
def test_optimizers_step_as_on_layers_apart(options, readers):
    """Also in backward: dgrad reads the weights before the first of them is stepped."""
    results = [_trained(grouped, readers, **options) for grouped in (False, True)]
    least = 15 if readers is Gated else 20
    for apart, grouped in zip(*results, strict=True):
        assert sqnr_db(apart, grouped) > least


@both_groups
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_gradients_take_the_memory_of_layers_apart(level, readers):
    def gradients(grouped):
        model, config = Model(readers, dtype=torch.float32), FP8Config(opt_level=level)
        convert_to_float8(model, config)
        if not grouped:
            _separate(model)
        optimizer = torch.optim.AdamW(model.parameters())
        if level != "O1":
            convert_optimizer(optimizer, config, model=model)
        model(gaussian(64, SIZE, dtype=torch.float32)).sum().backward()
        return memory_report(model, optimizer).gradients

    assert gradients(True) == gradients(False)


def test_a_layer_that_was_replaced_is_freed():
    model = _converted()
    replaced = weakref.ref(model.readers.key)
    model.readers.key = nn.Linear(SIZE, SIZE).bfloat16()
    assert replaced() is None
    model(gaussian(32, SIZE).requires_grad_()).sum().backward()
    assert model.readers.query.weight.grad is not None
