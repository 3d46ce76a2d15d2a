import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.internals import (
    Float8Grad,
    SplitWeight,
    WideGrad,
    expected_memory,
    half,
    join_parameter,
    split_parameter,
    stored_grad,
)
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report

SIZE = 64
TERM = torch.linspace(0.5, 1.5, SIZE * SIZE).view(SIZE, SIZE).bfloat16()  # (64, 64)


def weight_of(**options):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(SIZE, SIZE), **options)
    return split_parameter(parameter)


def add(weight, term=TERM, count=1):
    """Run backwards that each give a weight the gradient `term`."""
    for _ in range(count):
        half(weight).backward(term)


def assert_is_sum(gradient, exact):
    """Compare with the sum in float64: no bias, and at least 30 dB."""
    gradient, exact = gradient.detach().double(), exact.double()
    assert abs(float((gradient * exact).sum() / exact.square().sum()) - 1) < 0.003
    noise = (gradient - exact).square().sum() / exact.square().sum()
    assert float(noise) < 1e-3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SIZE, SIZE)
        self.up, self.norm = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)
        self.lm_head = nn.Linear(SIZE, SIZE)
        self.tied = nn.Linear(SIZE, SIZE, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.up(self.norm(self.embedding(tokens)))
        return self.lm_head(x) + self.tied(x)


def converted(level, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer(model.parameters(), lr=1e-3)
    config = FP8Config(recipe="tensorwise", opt_level=level)
    convert_to_float8(model, config)
    convert_optimizer(optimizer, config, model=model)
    return model, optimizer


def micro_batches(model, count, *, checkpointed=None):
    """Run backwards; return the sum, in float64, of what autograd gives to each parameter."""
    sums, handles = {}, []
    for name, p in model.named_parameters():

        def hook(grad, name=name):
            sums[name] = sums.get(name, 0) + grad.detach().double()

        handles.append(p.register_hook(hook))
    for i in range(count):
        tokens = torch.arange(16).add(i) % SIZE
        with torch.autocast("cpu", torch.bfloat16):
            if checkpointed is None:
                y = model(tokens)
            else:
                y = checkpoint(model, tokens, use_reentrant=checkpointed)
        F.mse_loss(y.float(), torch.ones(16, SIZE)).div(count).backward()
    for handle in handles:
        handle.remove()
    return sums


@pytest.mark.parametrize(("level", "checkpointed"), [("O2", None), ("O2", False), ("O3", None)])
def test_every_parameter_has_the_sum(level, checkpointed):
    model, optimizer = converted(level)
    for count in (1, 12):
        sums = micro_batches(model, count, checkpointed=checkpointed)
        for name, p in model.named_parameters():
            stored = stored_grad(p)
            if isinstance(stored, Float8Grad):
                exact = sums[name]
                projection = (p.grad.double() * exact).sum() / exact.square().sum()
                assert abs(float(projection) - 1) < 0.01, name
                continue
            assert_is_sum(p.grad, sums[name])
            if isinstance(p, SplitWeight):
                assert stored.dtype == (torch.bfloat16 if count == 1 else torch.float32), name
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("count", [64, 512, 2048])
def test_a_sum_of_many_micro_batches_does_not_fall_short(count):
    weight = weight_of()
    add(weight, count=count)
    assert_is_sum(weight.grad, TERM.double() * count)


WRITES = {
    "add_": lambda p, x: p.grad.add_(x),
    "add_ of a BF16 tensor": lambda p, x: p.grad.add_(x.bfloat16()),
    "+=": lambda p, x: setattr(p, "grad", p.grad.__iadd__(x)),
    "sub_": lambda p, x: p.grad.sub_(x, alpha=-1),
    "data": lambda p, x: p.grad.data.add_(x),
    "detach": lambda p, x: p.grad.detach().add_(x),
    "foreach": lambda p, x: torch._foreach_add_([p.grad], [x]),
    "backward": lambda p, x: add(p, x.bfloat16()),
    "grad of the loss": lambda p, x: p.grad.add_(torch.autograd.grad(half(p), p, x.bfloat16())[0]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_user_code_adds_gradients(write):
    weight = weight_of()
    add(weight)
    held = weight.grad  # code that holds the gradient sees the sum
    for _ in range(149):
        write(weight, TERM.float())
    assert_is_sum(weight.grad, TERM.double() * 150)
    assert_is_sum(held, TERM.double() * 150)


def test_one_micro_batch_stays_bf16_whatever_is_done_with_it():
    weight = weight_of()
    add(weight)
    nn.utils.clip_grad_norm_([weight], 1.0)
    weight.grad.mul_(0.5).div_(2)
    assert isinstance(weight.grad, WideGrad)
    assert stored_grad(weight).dtype == torch.bfloat16
    weight.grad.zero_()
    assert stored_grad(weight).dtype == torch.bfloat16


def test_a_gradient_that_is_dropped_begins_a_bf16_one():
    weight = weight_of()
    for drop in (
        lambda: setattr(weight, "grad", None),
        lambda: torch.optim.SGD([weight]).zero_grad(),
        lambda: delattr(weight, "grad"),
    ):
        add(weight, count=3)
        assert stored_grad(weight).dtype == torch.float32
        drop()
        assert weight.grad is None
        add(weight)
        assert stored_grad(weight).dtype == torch.bfloat16
        weight.grad = None
    add(weight, count=3)
    torch.optim.SGD([weight]).zero_grad(set_to_none=False)
    add(weight)
    assert torch.equal(weight.grad, TERM.float())


@pytest.mark.parametrize("foreach", [False, True])
def test_a_gradient_after_zeros_is_the_one_after_none(foreach):
    weight = weight_of()
    add(weight)
    torch.optim.SGD([weight], foreach=foreach).zero_grad(set_to_none=False)
    add(weight)
    assert stored_grad(weight).dtype == torch.bfloat16
    assert torch.equal(weight.grad, TERM.float())
    add(weight, count=149)
    assert_is_sum(weight.grad, TERM.double() * 150)
    weight.grad = None
    add(weight)
    weight.grad.zero_().fill_(1)  # a write after the zeros makes the next gradient a sum
    add(weight)
    assert stored_grad(weight).dtype == torch.float32


def test_hooks_see_the_sum():
    weight, seen = weight_of(), []
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    add(weight, count=2)
    for gradient, factor in zip(seen, (1, 1, 1, 2), strict=True):
        assert torch.equal(gradient, TERM.float() * factor)
    weight.grad = None
    weight.register_hook(lambda grad: 2 * grad)
    add(weight)
    assert stored_grad(weight).dtype == torch.bfloat16
    assert torch.equal(weight.grad, TERM.float() * 2)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_gradients_is_summed():
    weight, plain = weight_of(), nn.Parameter(torch.zeros(SIZE, SIZE))
    plain.data.copy_(weight.halves.high)
    for p in (weight, plain):
        for _ in range(2):
            (half(p) if p is weight else p).float().pow(3).sum().backward(create_graph=True)
        p.grad.sum().backward()
    torch.testing.assert_close(
        weight.grad.detach().clone(), plain.grad.detach(), rtol=0.02, atol=0.1
    )


FORMS = {
    "copied": copy.deepcopy,
    "split again": lambda p: (join_parameter(p), split_parameter(p))[1],
    "moved": lambda p: nn.Module.to(holder(p), "meta").to_empty(device="cpu").p,
    "frozen in between": lambda p: p.requires_grad_(False).requires_grad_(True),
    "split while frozen": lambda p: weight_of(requires_grad=False).requires_grad_(True),
    "hooked": lambda p: (p.register_hook(lambda grad: None).remove(), p)[1],
}


def holder(parameter):
    module = nn.Module()
    module.p = parameter
    return module


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_a_weight_sums_in_float32(form):
    weight = form(weight_of())
    weight.grad = None
    add(weight, count=2)
    assert stored_grad(weight).dtype == torch.float32
    assert torch.equal(weight.grad, TERM.float() * 2)
    join_parameter(weight)
    assert not weight._backward_hooks


def test_no_warning_about_hooks_of_a_weight_that_is_sent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.utils.hooks.warn_if_has_hooks(weight_of())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_graph_from_before_the_split_adds_its_gradient(count):
    parameter = nn.Parameter(torch.zeros(SIZE, SIZE))
    earlier = (parameter * TERM.float()).sum()
    weight = split_parameter(parameter)
    add(weight, count=count)
    earlier.backward()
    assert torch.equal(weight.grad, TERM.float() * (count + 1))


@pytest.mark.parametrize("summed", [False, True])
def test_the_bytes_of_sums_are_counted(summed):
    model, optimizer = converted("O2")
    expected = expected_memory(model, [optimizer], summed=summed)
    micro_batches(model, 2 if summed else 1)
    assert memory_report(model, optimizer).gradients == expected.gradients
