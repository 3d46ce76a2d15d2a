"""Loss heads in FP8: as the FP8 layer with its logits in memory, at each level and in each form."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.internals import Float8FrozenWeight, LazyLogits, OutputLayer, sqnr_db
from tests.torch_fp8.loss_head.logits_cases import (
    H,
    LanguageModel,
    Largest,
    V,
    batch,
    is_fused,
    small_chunks,
)
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, set_forward_precision


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    small_chunks(monkeypatch)


def _loss(logits, labels):
    return F.cross_entropy(logits.float().view(-1, V), labels.view(-1))


def _models(level="O1", model=None, **options):
    """The head in FP8 with its logits, fused in FP8, and fused in BF16."""
    torch.manual_seed(0)
    model = LanguageModel() if model is None else model
    models = []
    for choice in ({"skip": (), "loss_head": "off"}, {"loss_head": "fp8"}, {"loss_head": "bf16"}):
        models.append(copy.deepcopy(model))
        config = FP8Config("tensorwise", opt_level=level, **choice, **options)
        convert_to_float8(models[-1], config)
    return models


SHAPE = (4, 96)
"""Emulated products pad the tokens of a chunk to 128."""


def _step(model, autocast=True, seed=0):
    tokens, labels = batch(seed, SHAPE)
    with Largest() as largest:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = _loss(model(tokens), labels)
        loss.backward()
    return loss.detach(), largest.numel


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_loss_and_gradients_are_those_of_the_fp8_layer(level, tied):
    models = _models(level, LanguageModel(tied=tied))
    grads, losses = [], []
    for model in models:
        if level != "O1":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            convert_optimizer(optimizer, model.inner.fp8.config, model=model)
        loss, numel = _step(model)
        losses.append(loss)
        grads.append(model.lm_head.weight.grad.to_dense().float())
        if model.inner.fp8.config.loss_head != "off":
            assert is_fused(numel, SHAPE)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)
    # The gradient of the logits has two bits of mantissa in E5M2.
    assert sqnr_db(grads[2], grads[1]) >= 22
    assert sqnr_db(grads[0], grads[1]) >= 22


def test_a_read_is_that_of_the_fp8_layer():
    stock, fused, _ = _models()
    tokens, _ = batch()
    for model in (stock, fused):
        model.results = []
        logits = model(tokens)
        model.results += [logits.argmax(-1), logits.square().mean()]
        model.results[-1].backward()
        model.results.append(model.lm_head.weight.grad)
    for got, want in zip(fused.results, stock.results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_logits_are_read_after_the_step():
    stock, fused, _ = _models()
    tokens, labels = batch()
    values = []
    for model in (stock, fused):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
            _loss(logits, labels).backward()
            optimizer.step()
        values.append(logits.detach().float())
    torch.testing.assert_close(*values, rtol=0, atol=0)


def test_an_autograd_function_of_the_logits():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    grads = []
    for model in _models()[:2]:
        tokens, labels = batch()
        _loss(Double.apply(model(tokens)), labels).backward()
        grads.append(model.lm_head.weight.grad)
    assert sqnr_db(*grads) >= 40


def test_a_frozen_head_is_stored_in_fp8_and_has_no_gradient():
    model = LanguageModel()
    model.lm_head.requires_grad_(False)
    stock, fused, _ = _models("O2", model, frozen_weights="fp8")
    assert isinstance(fused.lm_head.weight, Float8FrozenWeight)
    want, _ = _step(stock)
    loss, numel = _step(fused)
    assert is_fused(numel, SHAPE)
    # Its scales are of 128 x 128 elements; the fused products have one for the whole weight.
    torch.testing.assert_close(loss, want, rtol=4e-3, atol=0)
    assert fused.lm_head.weight.grad is None
    assert sqnr_db(stock.embed.weight.grad, fused.embed.weight.grad) >= 15


def test_another_name_of_the_head_runs_in_fp8_as_before():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, H), nn.Linear(H, H), nn.Linear(H, V))
    report = convert_to_float8(model, FP8Config("tensorwise"))
    assert report.loss_heads == {"2": "fp8"}
    assert "2" in report.converted
    tokens, labels = batch(0, SHAPE)
    with Largest() as largest:
        F.cross_entropy(model(tokens % 64).transpose(1, 2), labels).backward()
    assert is_fused(largest.numel, SHAPE)


def test_a_layer_that_is_no_head_returns_logits_after_a_few_forwards():
    model = nn.Sequential(nn.Linear(H, H), nn.Linear(H, V))
    convert_to_float8(model, FP8Config("tensorwise"))
    assert isinstance(model[1], OutputLayer)
    x = torch.randn(4, H, dtype=torch.float32)
    for _ in range(3):
        assert isinstance(model(x), LazyLogits)
        model(x).square().mean().backward()
    assert type(model(x)) is torch.Tensor


def test_high_precision_and_evaluation_are_those_of_the_layer():
    stock, fused, _ = _models(eval_fp8=False)
    tokens, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(fused.eval()(tokens), stock.eval()(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("loss_head", ["bf16", "fp8"])
def test_fake_tensors_have_the_same_gradients_without_logits(loss_head):
    # So does `torch-fp8 plan` count a step.
    with torch.device("meta"):
        model = LanguageModel()
    convert_to_float8(model, FP8Config("tensorwise", loss_head=loss_head), device="cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tokens = torch.randint(0, V, (4, 4096))
        with Largest() as largest:
            with torch.autocast("cpu", torch.bfloat16):
                loss = _loss(model(tokens), tokens)
            loss.backward()
    assert model.lm_head.weight.grad.shape == (V, H)
    assert largest.numel < 4 * 4096 * V


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_forward_in_bf16_is_a_head_in_bf16_without_logits_in_memory(level):
    _, in_fp8, in_bf16 = _models(level)
    for model in (in_fp8, in_bf16):
        config = FP8Config("tensorwise", opt_level=level)
        convert_optimizer(torch.optim.AdamW(model.parameters()), config, model=model)
    before = _step(in_fp8)[0]
    for model in (in_fp8, in_bf16):
        model.zero_grad()
        set_forward_precision(model, "bf16")
    (ours, largest), (theirs, _) = _step(in_fp8), _step(in_bf16)
    assert largest < 4 * 96 * V
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    assert abs(ours - theirs) < abs(before - theirs) / 4
