import copy
import warnings

import pytest
import torch
import torch.autograd.functional as functional
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap

import torch_fp8
from tests.internals import current_pass
from tests.torch_fp8.converted_models import KINDS, SIZE, stock_and_converted
from torch_fp8.ops import registry

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
SAVES_FP8 = ("RMSNorm", "SwiGLU", "joined SwiGLU", "Smooth-SwiGLU")
"""Kinds whose backward needs an input that is there as a payload alone."""


def _x():
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))


def _trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _loss(model):
    return lambda x: model(x).square().mean()


def _gradient_penalty(model):
    """As WGAN-GP has it."""
    x = _x().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (gradient.norm(dim=1) - 1).square().mean().backward()
    return [p.grad for p in _trained(model).values()]


def _penalty_of_inputs(model):
    x = _x().requires_grad_()
    _loss(model)(x).backward(inputs=[x], create_graph=True)
    gradient, x.grad = x.grad, None
    gradient.square().sum().backward()
    return [x.grad, *(p.grad for p in _trained(model).values())]


def _penalty_of_all(model):
    x = _x().requires_grad_()
    _loss(model)(x).backward(create_graph=True)
    gradient, x.grad = x.grad, None
    gradient.square().sum().backward()
    return [x.grad, *(p.grad for p in _trained(model).values())]


def _product_with_hessian_of_weights(model):
    weights = list(_trained(model).values())
    gradients = torch.autograd.grad(_loss(model)(_x()), weights, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in gradients), weights)


def _second_order_maml(model):
    weights = _trained(model)
    loss = functional_call(model, weights, (_x(),)).square().mean()
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    steps = zip(weights.items(), gradients, strict=True)
    adapted = {name: p - 0.1 * g for (name, p), g in steps}
    outer = functional_call(model, adapted, (_x() + 1,)).square().mean()
    return torch.autograd.grad(outer, list(weights.values()))


def _invariance_penalty(model):
    """As IRM has it, of a scale behind the model."""
    scale = torch.ones(1, requires_grad=True)
    loss = (model(_x()) * scale).square().mean()
    (gradient,) = torch.autograd.grad(loss, scale, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), list(_trained(model).values()))


def _gradients_of_each_sample(model):
    def loss(weights, x):
        return functional_call(model, weights, (x,)).square().mean()

    weights = {name: p.detach() for name, p in _trained(model).items()}
    return list(vmap(grad(loss), (None, 0))(weights, _x()[:, None]).values())


def _tangent(model, gradients=True):
    with forward_ad.dual_level(), torch.set_grad_enabled(gradients):
        y = model(forward_ad.make_dual(_x(), _x().flip(0)))
        return [forward_ad.unpack_dual(y).tangent]


def _batched(model):
    x = _x().requires_grad_()
    directions = torch.stack([torch.ones(4, SIZE), _x()])
    return torch.autograd.grad(model(x), x, directions, is_grads_batched=True)


DIFFERENTIATED = {
    "gradient penalty": _gradient_penalty,
    "backward(inputs=)": _penalty_of_inputs,
    "hvp": lambda m: [functional.hvp(_loss(m), _x(), _x().flip(0))[1]],
    "jvp by two backwards": lambda m: [functional.jvp(m, _x(), _x().flip(0))[1]],
    "hessian": lambda m: [functional.hessian(_loss(m), _x()[:1])],
}
"""Entries that differentiate gradients of the input."""
OF_WEIGHTS = {
    "backward(create_graph=)": _penalty_of_all,
    "Hessian of weights": _product_with_hessian_of_weights,
    "MAML": _second_order_maml,
}
ONCE = {"IRM": _invariance_penalty, "is_grads_batched": _batched}
"""Entries that do not differentiate what a layer's backward computes."""
TRANSFORMED = {
    "grad": lambda m: [grad(_loss(m))(_x())],
    "vjp": lambda m: vjp(m, _x())[1](_x()),
    "jvp": lambda m: list(jvp(m, (_x(),), (_x().flip(0),))),
    "hessian": lambda m: [hessian(_loss(m))(_x()[:1])],
    "vmap": lambda m: [vmap(m)(_x()[:, None])],
    "gradients of each sample": _gradients_of_each_sample,
    "forward-mode AD": _tangent,
    "forward-mode AD without gradients": lambda m: _tangent(m, False),
}


def _error(want, got):
    assert [t is None for t in want] == [t is None for t in got]
    want, got = (torch.cat([t.reshape(-1) for t in all_ if t is not None]) for all_ in (want, got))
    return ((got - want).norm() / want.norm()).item()


def _runs_on_weights(kind, entry):
    return kind != "frozen" or not (entry in OF_WEIGHTS or entry in ("gradient penalty", "IRM"))


@pytest.mark.parametrize("entry", {**DIFFERENTIATED, **OF_WEIGHTS})
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_a_gradient_is_right_or_refused_by_name(kind, entry):
    run = {**DIFFERENTIATED, **OF_WEIGHTS}[entry]
    stock, converted = stock_and_converted(kind)
    if not _runs_on_weights(kind, entry):
        return
    want = run(stock)
    if kind in SAVES_FP8 or entry in OF_WEIGHTS:
        name = r"'[012](\.\w+)?'"
        with pytest.raises(RuntimeError, match=name + ".*high_precision.*skip=.*" + name):
            run(converted)
    else:
        assert _error(want, run(converted)) < 0.15


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_penalty_trains_in_each_recipe(recipe):
    """The error of FP8's own gradients; with the second order left out it is 1."""
    stock, converted = stock_and_converted("linear", recipe)
    assert _error(_gradient_penalty(stock), _gradient_penalty(converted)) < 0.15


@pytest.mark.parametrize("entry", ONCE)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_differentiated_once_runs_in_fp8(kind, entry):
    if _runs_on_weights(kind, entry):
        stock, converted = stock_and_converted(kind)
        assert 0.001 < _error(ONCE[entry](stock), ONCE[entry](converted)) < 0.25


@pytest.mark.parametrize("entry", TRANSFORMED)
@pytest.mark.parametrize("kind", KINDS)
def test_transforms_and_forward_mode_run_in_high_precision(kind, entry):
    if kind == "frozen" and entry == "gradients of each sample":
        return
    stock, converted = stock_and_converted(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert _error(TRANSFORMED[entry](stock), TRANSFORMED[entry](converted)) < 1e-5


@pytest.mark.parametrize("entry", {**DIFFERENTIATED, **OF_WEIGHTS})
@pytest.mark.parametrize("kind", KINDS)
def test_within_high_precision_everything_is_exact(kind, entry):
    run = {**DIFFERENTIATED, **OF_WEIGHTS}[entry]
    stock, converted = stock_and_converted(kind, "delayed")
    if not _runs_on_weights(kind, entry):
        return
    before = {name: b.clone() for name, b in converted.named_buffers()}
    with torch_fp8.high_precision():
        assert _error(run(stock), run(converted)) < 1e-5
    for name, buffer in converted.named_buffers():
        assert torch.equal(before[name], buffer)
    assert not torch.equal(converted(_x()), stock(_x()))


def test_weights_of_16_bits_multiply_inputs_of_32():
    stock, converted = stock_and_converted("linear")
    converted.bfloat16()
    with torch_fp8.high_precision():
        y = converted(_x())
    assert y.dtype == torch.float32
    assert _error([stock(_x())], [y]) < 0.01


def test_a_gradient_that_is_differentiated_comes_with_that_of_the_bias():
    gradients = []
    for model in stock_and_converted("linear"):
        x = _x().requires_grad_()
        loss = model(x).square().mean()
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        gradients.append(torch.autograd.grad(loss, (x, *biases), create_graph=True))
    assert len(gradients[0]) > 1
    assert _error(*gradients) < 0.1


def test_a_transform_is_said_once():
    torch_fp8.autograd.current_pass.warn_once.cache_clear()
    _, converted = stock_and_converted("linear")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            vmap(converted)(_x()[:, None])
    (one,) = said
    assert "high precision under transforms of torch.func" in str(one.message)


def test_the_dispatcher_sees_operators_on_batched_gradients(monkeypatch):
    """On CUDA eager code goes past it otherwise."""
    monkeypatch.setattr(registry, "on_cuda", lambda x: True)
    seen = []
    vmap(lambda x: seen.append(registry.is_watched(x)) or x)(_x())
    assert seen == [True]
    assert not registry.is_watched(_x())


def test_compiled_layers_follow_into_high_precision_and_back():
    stock, converted = stock_and_converted("linear")
    compiled = torch.compile(converted, backend="eager", fullgraph=True)
    in_fp8 = compiled(_x())
    with torch_fp8.high_precision():
        assert _error([stock(_x())], [compiled(_x())]) < 1e-6
    assert torch.equal(compiled(_x()), in_fp8)


def test_a_frozen_part_in_front_leaves_its_weights_out():
    """The gradient of the input passes layers whose weights take none."""
    stock, converted = stock_and_converted("linear")
    for model in (stock, converted):
        model[0].requires_grad_(False)
    assert _error(_gradient_penalty(stock), _gradient_penalty(converted)) < 0.15


def test_autocast_turned_off_in_a_region_is_told_once_with_a_way_to_float32():
    current_pass.warn_once.cache_clear()
    layer, x = nn.Linear(64, 64), torch.randn(4, 64)
    stock = copy.deepcopy(layer)
    torch_fp8.convert_to_float8(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)  # without autocast
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            layer(x)
    layer.fp8.forget_quantizers()
    off = torch.autocast("cpu", enabled=False)
    with torch.autocast("cpu", torch.bfloat16), off:
        with pytest.warns(UserWarning, match="within torch.autocast.enabled=False."):
            layer(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer.eval()(x)
        with torch_fp8.high_precision():
            assert torch.equal(layer(x), stock(x))
