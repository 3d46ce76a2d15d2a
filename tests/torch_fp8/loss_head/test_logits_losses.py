"""Losses on uncomputed logits: stock's values and gradients, without a tensor of all logits."""

import pytest
import torch
import torch.nn.functional as F

from tests.internals import LazyLogits, log_probs, scale_and_softcap
from tests.torch_fp8.loss_head.logits_cases import (
    LOSSES,
    V,
    assert_like_stock,
    batch,
    flat_loss,
    is_fused,
    pair,
    small_chunks,
    step,
)


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    small_chunks(monkeypatch)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_stock_without_its_logits(name):
    want, numel = assert_like_stock(*pair(), LOSSES[name])
    assert not is_fused(want)
    assert is_fused(numel)


@pytest.mark.parametrize("name", ["flat", "shifted", "transformers, num_items_in_batch"])
def test_a_bias_and_a_tied_weight_get_their_gradients(name):
    assert is_fused(assert_like_stock(*pair(bias=True), LOSSES[name])[1])
    assert is_fused(assert_like_stock(*pair(tied=True), LOSSES[name])[1])


@pytest.mark.parametrize("name", ["float", "transformers", "shifted"])
def test_float32_without_autocast(name):
    assert is_fused(assert_like_stock(*pair(), LOSSES[name], db=100, autocast=False)[1])


def test_weights_in_bf16_without_autocast():
    models = pair(dtype=torch.bfloat16)
    assert is_fused(assert_like_stock(*models, LOSSES["transformers"], db=42, autocast=False)[1])


def test_a_loss_of_bf16_logits_is_nearer_to_the_exact_one_than_stock():
    stock, fused = pair(dtype=torch.bfloat16)
    exact = step(stock, lambda z, y: flat_loss(z.double(), y), autocast=False)[0]
    want, _, _ = step(stock, flat_loss, autocast=False)
    loss, _, numel = step(fused, flat_loss, autocast=False)
    assert loss.dtype == want.dtype == torch.bfloat16
    assert is_fused(numel)
    assert abs(loss - exact) <= max(abs(want - exact), 2.0**-8 * exact)


def test_a_vocabulary_that_is_no_multiple_of_16():
    def loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    assert is_fused(assert_like_stock(*pair(classes=V + 3), loss)[1])


def test_a_weight_with_other_strides():
    def transpose(model):
        weight = model.lm_head.weight.detach()
        model.lm_head.weight = torch.nn.Parameter(weight.t().contiguous().t())
        assert not model.lm_head.weight.is_contiguous()

    assert is_fused(assert_like_stock(*pair(change=transpose), flat_loss)[1])


def test_a_softcap_and_a_factor_that_is_no_power_of_two():
    # Stock rounds to BF16 after each step, the fused loss only the product: 2^-9 of each logit.
    def capped(z, y):
        z = torch.tanh(z / 30)
        return flat_loss((z * 30).float(), y)

    assert is_fused(assert_like_stock(*pair(), capped, rtol=2e-4, db=38)[1])
    scaled = assert_like_stock(*pair(), lambda z, y: flat_loss(z / 3, y), rtol=2e-4, db=38)
    assert is_fused(scaled[1])
    exact = assert_like_stock(*pair(), lambda z, y: capped(z.float(), y))
    assert is_fused(exact[1])


def test_the_order_of_factors_and_tanh_decides():
    assert scale_and_softcap((0.5, 3.0)) == (1.5, None)
    assert scale_and_softcap((0.25, 0.125, None, 8.0)) == (0.25, 8.0)
    assert scale_and_softcap((None,)) == (1.0, 1.0)
    assert scale_and_softcap((0.5, None, 2.0, None)) is None
    assert scale_and_softcap((0.5, None, -2.0)) is None


def test_a_loss_of_each_token_has_the_shape_of_the_labels():
    stock, fused = pair()
    tokens, labels = batch()
    with torch.no_grad():
        want = F.cross_entropy(stock(tokens).transpose(1, 2), labels, reduction="none")
    loss = F.cross_entropy(fused(tokens).transpose(1, 2).detach(), labels, reduction="none")
    torch.testing.assert_close(loss, want)
    assert not loss.requires_grad


@pytest.mark.parametrize(
    ("name", "loss"),
    {
        "soft labels": lambda z, y: F.cross_entropy(z[0], torch.full((24, V), 1 / V)),
        "labels out of range": lambda z, y: flat_loss(z, y.clamp(min=V)),
        "labels of another shape": lambda z, y: F.cross_entropy(z.view(-1, V), y),
        "classes in the wrong place": lambda z, y: F.cross_entropy(z, y),
        "labels as int32": lambda z, y: flat_loss(z, y.int()),
        "an unknown reduction": lambda z, y: flat_loss(z, y, reduction="median"),
        "weights of another length": lambda z, y: flat_loss(z, y, weight=torch.ones(3)),
        "a view that torch refuses": lambda z, y: z[:, :-1].view(-1, V).sum(),
        "a view of another size": lambda z, y: z.view(-1, V + 1).sum(),
        "an index out of range": lambda z, y: z[9].sum(),
        "all labels ignored": lambda z, y: flat_loss(z, torch.full_like(y, -100)),
        "no tokens": lambda z, y: flat_loss(z[:, :0], y[:, :0]),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_gets_the_result_or_the_error_of_stock(name, loss):
    outcomes = []
    for model in pair():
        try:
            outcomes.append(step(model, loss, autocast=False)[0])
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            outcomes.append(type(error))
    if isinstance(outcomes[0], torch.Tensor):
        torch.testing.assert_close(outcomes[1], outcomes[0], equal_nan=True)
    else:
        assert outcomes[1] is outcomes[0]


def test_a_repeated_backward_scales_once_and_a_second_derivative_is_refused():
    stock, fused = pair()
    tokens, labels = batch()
    for model in (stock, fused):
        loss = flat_loss(model(tokens), labels)
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    for name, parameter in stock.named_parameters():
        got = fused.get_parameter(name).grad
        torch.testing.assert_close(got, parameter.grad, rtol=0.1, atol=1e-4)
    torch.testing.assert_close(fused.lm_head.weight.grad, stock.lm_head.weight.grad)
    loss = flat_loss(fused(tokens), labels)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, fused.lm_head.weight, create_graph=True)


def test_the_head_returns_logits_of_stocks_shape_and_dtype():
    stock, fused = pair()
    tokens, _ = batch()
    with torch.autocast("cpu", torch.bfloat16):
        want, logits = stock(tokens), fused(tokens)
    assert isinstance(logits, LazyLogits)
    assert (logits.shape, logits.dtype, logits.device) == (want.shape, want.dtype, want.device)
    assert (logits.stride(), logits.requires_grad, logits.is_leaf) == (want.stride(), True, False)
    shifted = logits[:, :-1].transpose(1, 2)
    assert isinstance(shifted, LazyLogits)
    assert shifted.stride() == want[:, :-1].transpose(1, 2).stride()


@pytest.mark.parametrize("prepare", [lambda z: z.float(), lambda z: z[:, :-1] / 2, lambda z: z])
def test_log_probabilities_are_those_of_stock_without_logits(prepare):
    def loss_of(logits, labels):
        logits = prepare(logits)
        target = labels[:, : logits.shape[1]].clamp(min=0)
        if isinstance(logits, LazyLogits):
            return log_probs(logits, target, 0.5).square().mean()
        log_p = (logits.float() / 0.5).log_softmax(-1)
        return log_p.gather(-1, target[..., None]).square().mean()

    stock, fused = pair(bias=True)
    assert is_fused(assert_like_stock(stock, fused, loss_of)[1])
    tokens, labels = batch()
    logits = fused(tokens)
    assert log_probs(logits, labels[:, 1:]) is NotImplemented
    assert log_probs(logits.log_softmax(-1), labels) is NotImplemented
    logits.argmax(-1)
    assert log_probs(logits, labels) is NotImplemented


def test_the_mean_of_detached_logits_reads_none():
    stock, fused = pair(bias=True)
    tokens, _ = batch()
    want, logits = stock(tokens), fused(tokens)
    for view in (lambda z: z.float() / 4, lambda z: z[:2, :-1], lambda z: z.transpose(1, 2)):
        got = view(logits).detach().mean()
        torch.testing.assert_close(got, view(want).detach().mean(), rtol=1e-4, atol=1e-5)
    assert not logits.recorded.call.is_read
    assert fused.lm_head.loss_head.reads == 0
    torch.testing.assert_close(logits.detach().mean(-1), want.mean(-1))  # reads them
    assert logits.recorded.call.is_read
