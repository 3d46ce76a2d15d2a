"""Uncomputed logits that something else reads: the tensor of stock, or an error that names them."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils.operations import convert_to_fp32
from torch.utils.checkpoint import checkpoint

from tests.internals import HeadCall, LazyLogits, output_layer
from tests.torch_fp8.loss_head.logits_cases import (
    V,
    assert_like_stock,
    batch,
    is_fused,
    pair,
    small_chunks,
    step,
)
from torch_fp8 import high_precision


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    small_chunks(monkeypatch)


def assert_equal(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def _argmax_first(z, y):
    best = z.argmax(-1)
    return _loss(z, y) + 0 * best.sum()


def _loss(logits, labels):
    return F.cross_entropy(logits.float().view(-1, V), labels.view(-1))


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class _Reversed(torch.autograd.Function):
    """A gradient that is not the derivative of forward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -3 * grad


def _in_place(z, y):
    z.mul_(0.5)
    return _loss(z, y)


def _in_place_after_a_copy(z, y):
    copied = z.clone()
    z.mul_(0.5)
    return _loss(copied, y) + _loss(z, y)


def _write_through_a_view(z, y):
    z.view(-1, V)[0] = 0
    return _loss(z, y)


def _write_through_data(z, y):
    z.data.mul_(0.5)
    return _loss(z, y)


def _retained(z, y):
    z.retain_grad()
    loss = _loss(z, y)
    loss.register_hook(lambda grad: grad)
    return loss + 0 * _loss(z * 2, y)


def _penalty(z, y):
    return _loss(z, y) + 1e-3 * z.logsumexp(-1).square().mean()


READS = {
    "argmax first": _argmax_first,
    "arithmetic": lambda z, y: (z * z).mean(),
    "a second tensor": lambda z, y: torch.add(y[..., None].float(), z).mean(),
    "log_softmax and gather": lambda z, y: (
        -z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]).mean()
    ),
    "log_softmax and a factor": lambda z, y: F.nll_loss(
        (2 * F.log_softmax(z, -1)).view(-1, V), y.view(-1)
    ),
    "log_softmax of the tokens": lambda z, y: _loss(F.log_softmax(z, 1), y),
    "two log_softmax": lambda z, y: _loss(z.log_softmax(-1).log_softmax(-1), y),
    "nll_loss of logits": lambda z, y: F.nll_loss(z.view(-1, V), y.view(-1)),
    "a penalty on logits": _penalty,
    "an autograd function": lambda z, y: _loss(_Double.apply(z), y),
    "an autograd function of recorded logits": lambda z, y: _loss(
        _Double.apply(z.float().view(-1, V)), y
    ),
    "a reversed gradient": lambda z, y: _loss(_Reversed.apply(z), y),
    "a reversed gradient, flattened": lambda z, y: _loss(_Reversed.apply(z.view(-1, V)), y),
    "an in-place write": _in_place,
    "an in-place write after a copy": _in_place_after_a_copy,
    "a write through a view": _write_through_a_view,
    "a write through data": _write_through_data,
    "a retained gradient": _retained,
    "an index of classes": lambda z, y: z[0, 1, 5:900].square().mean(),
    "classes in two dimensions": lambda z, y: z.view(4, 24, 2, -1).square().mean(),
    "all in one dimension": lambda z, y: z.flatten().square().mean(),
    "classes sliced": lambda z, y: z[..., :5].square().mean(),
    "a hook": lambda z, y: (z.register_hook(lambda g: 2 * g), _loss(z, y))[1],
    "a list of rows": lambda z, y: sum(row.square().mean() for row in z),
    "torch.stack": lambda z, y: torch.stack([z, z]).square().mean(),
    "checkpoint": lambda z, y: checkpoint(_loss, z, y, use_reentrant=False),
    "reentrant checkpoint": lambda z, y: checkpoint(_loss, z, y, use_reentrant=True),
    "double": lambda z, y: F.cross_entropy(z.double().view(-1, V), y.view(-1)),
    "to half precision": lambda z, y: F.cross_entropy(z.half().view(-1, V), y.view(-1)),
    "max of classes": lambda z, y: z.max(dim=-1).values.float().mean(),
}
FUSED = {"a penalty on logits", "checkpoint"}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "float32"])
def test_a_read_has_the_values_and_gradients_of_stock(name, autocast):
    # A function of the program gets its gradient of the logits through a sum of its own.
    db = 45 if name in FUSED or "checkpoint" in name else 80
    stock, fused = pair(bias=True)
    assert_like_stock(stock, fused, READS[name], db=db, autocast=autocast)
    head = fused.lm_head.loss_head
    assert head.fused + head.reads > 0


def test_hooks_that_only_wait_for_backward_run_without_logits():
    def begins(grad):
        calls.append(grad)

    begins.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    for read in (False, True):
        calls = []
        _, fused = pair()
        tokens, labels = batch()
        logits = fused(tokens)
        logits.register_hook(begins)
        if read:
            logits.argmax(-1)
        loss = _loss(logits, labels)
        assert fused.lm_head.loss_head.fused == (not read)
        loss.backward()
        assert len(calls) == 1


def test_logits_are_computed_once_however_often_they_are_read(monkeypatch):
    calls = []
    multiply = HeadCall.multiply
    monkeypatch.setattr(HeadCall, "multiply", lambda *a: (calls.append(1), multiply(*a))[1])
    _, fused = pair()
    tokens, labels = batch()
    logits = fused(tokens)
    for _ in range(2):
        logits.argmax(-1), logits.float().sum(), logits.detach().max()
    _loss(logits, labels).backward()
    assert len(calls) == 1
    assert fused.lm_head.loss_head.fused == 0


def test_the_grad_mode_and_autocast_are_those_of_the_heads_call():
    stock, fused = pair()
    tokens, _ = batch()
    with torch.autocast("cpu", torch.bfloat16):
        want, logits = stock(tokens), fused(tokens)
    assert_equal(logits + 0, want)
    assert (logits + 0).dtype == torch.bfloat16
    with torch.no_grad():
        logits = fused(tokens)
        assert type(logits) is torch.Tensor
    logits = fused(tokens)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        values = logits + 0
    assert not values.requires_grad
    assert values.dtype == torch.float32
    logits.sum().backward()  # the graph of the call, though it was read without one
    assert fused.lm_head.weight.grad is not None


@pytest.mark.parametrize(
    "look",
    {
        "shape and dtype": lambda z: (z.shape, z.dtype, z.size(-1), z.ndim, z.numel(), len(z)),
        "convert_to_fp32": lambda z: convert_to_fp32({"logits": z}),
        "detach": lambda z: z.detach(),
        "grad_fn": lambda z: (z.requires_grad, z.grad_fn, z.is_leaf, z.is_contiguous()),
        "isinstance": lambda z: (torch.is_tensor(z), torch.is_floating_point(z)),
        "a label shift": lambda z: z[..., :-1, :].contiguous(),
    }.values(),
)
def test_what_reads_no_element_computes_nothing(look):
    _, fused = pair()
    looked = []
    fused.lm_head.register_forward_hook(lambda *args: looked.append(look(args[2])))
    numel = step(fused, _loss)[2]
    assert looked
    assert is_fused(numel)


def test_logits_are_read_after_the_loss_and_after_backward():
    stock, fused = pair()
    tokens, labels = batch()
    for when in ("loss", "backward"):
        want, logits = stock(tokens), fused(tokens)
        loss = _loss(logits, labels)
        if when == "backward":
            loss.backward()
        assert_equal(logits.detach().argmax(-1), want.argmax(-1))
        assert_equal(logits.tolist()[0][0][:3], want.tolist()[0][0][:3])
        assert repr(logits).startswith("tensor([[[")


def test_logits_are_read_after_the_step_that_wrote_the_weight():
    # The commonest loop: zero_grad, forward, loss, backward, step, accuracy.
    stock, fused = pair()
    tokens, labels = batch()
    values = []
    for model in (stock, fused):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        before = model.lm_head.weight.clone()
        _loss(logits, labels).backward()
        optimizer.step()
        assert not torch.equal(before, model.lm_head.weight)
        values.append(logits.argmax(-1))
        with pytest.raises(RuntimeError, match=r"written|modified|second time"):
            logits.float().sum().backward()
        with pytest.raises(RuntimeError, match=r"written|modified|second time"):
            _loss(logits, labels).backward()
    assert_equal(*values)


def test_a_step_copies_no_weight_if_no_logits_are_left(monkeypatch):
    _, fused = pair()
    tokens, labels = batch()
    optimizer = torch.optim.SGD(fused.parameters(), lr=1.0)
    copies = []
    monkeypatch.setattr(HeadCall, "own_parameter", lambda call, _: copies.append(call))
    gc.collect()
    _loss(fused(tokens), labels).backward()
    optimizer.step()
    assert not copies
    logits = fused(tokens)
    optimizer.step()
    assert copies == [logits.recorded.call]


def _write(fused):
    with torch.no_grad():
        fused.lm_head.weight.mul_(2)


def _set_data(fused):
    fused.lm_head.weight.data = torch.zeros_like(fused.lm_head.weight)


@pytest.mark.parametrize("write", [_write, _set_data])
def test_a_written_weight_is_refused_by_name(write):
    _, fused = pair()
    tokens, labels = batch()
    logits = fused(tokens)
    write(fused)
    for read in (lambda: logits + 0, lambda: _loss(logits, labels)):
        with pytest.raises(RuntimeError, match=r"'lm_head' was written.*loss_head='off'"):
            read()


def test_another_parameter_in_its_place_leaves_the_logits_of_the_call():
    stock, fused = pair()
    tokens, _ = batch()
    want, logits = stock(tokens), fused(tokens)
    fused.lm_head.weight = torch.nn.Parameter(torch.zeros_like(fused.lm_head.weight))
    assert_equal(logits + 0, want)


def test_the_gradient_of_logits_behind_a_fused_loss_is_refused():
    _, fused = pair()
    tokens, labels = batch()
    logits = fused(tokens)
    loss = _loss(logits, labels)
    with pytest.raises(RuntimeError, match=r"'lm_head'.*without the logits"):
        torch.autograd.grad(loss, logits, allow_unused=True)
    logits = fused(tokens)
    logits.retain_grad()  # before the loss, logits are those of stock
    _loss(logits, labels).backward()
    assert logits.grad.shape == logits.shape


def test_copies_and_pickles_are_plain():
    stock, fused = pair()
    tokens, _ = batch()
    want = stock(tokens).detach()
    logits = fused(tokens).detach()
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for copied in (copy.deepcopy(logits), pickle.loads(pickle.dumps(logits)), saved):
        assert type(copied) is torch.Tensor
        assert_equal(copied, want)


def test_logits_and_hidden_states_are_freed_with_the_output():
    _, fused = pair()
    tokens, labels = batch()
    gc.disable()
    try:
        logits = fused(tokens)
        loss = _loss(logits, labels)
        logits.argmax(-1)
        call = weakref.ref(logits.recorded.call)
        hidden = weakref.ref(call().hidden)
        loss.backward()
        del logits, loss
        assert call() is None
        assert hidden() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_head_and_loss(use_reentrant):
    stock, fused = pair()

    def run(model):
        def loss_of(x, labels):
            return _loss(model.lm_head(x), labels)

        tokens, labels = batch()
        x = model.embed(tokens)
        loss = checkpoint(loss_of, x, labels, use_reentrant=use_reentrant)
        loss.backward()
        return loss.detach(), model.lm_head.weight.grad, model.embed.weight.grad

    for got, want in zip(run(fused), run(stock), strict=True):
        torch.testing.assert_close(got, want)


def test_layers_of_which_something_always_reads_stop_waiting():
    _, fused = pair()
    tokens, _ = batch()
    for _ in range(3):
        assert isinstance(fused(tokens), LazyLogits)
        fused(tokens).square().mean()
    assert type(fused(tokens)) is torch.Tensor


def test_large_logits_that_something_reads_are_said_once(monkeypatch):
    monkeypatch.setattr(output_layer, "_NOTABLE", 2**10)
    _, fused = pair()
    tokens, labels = batch()
    with pytest.warns(UserWarning, match=r"of 'lm_head' are in memory, 2 MiB.*softmax"):
        fused(tokens).softmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused(tokens).softmax(-1)
    _, fused = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = fused(tokens)
        _loss(logits, labels)
        logits.argmax(-1)  # metrics after a fused loss


def test_evaluation_and_high_precision_compute_logits():
    _, fused = pair()
    tokens, _ = batch()
    with high_precision():
        assert type(fused(tokens)) is torch.Tensor
    assert type(fused.eval()(tokens)) is torch.Tensor
    assert isinstance(fused.train()(tokens), LazyLogits)


def test_weights_of_fsdp1_compute_logits():
    _, fused = pair()
    tokens, _ = batch()
    # In forward it shows views of its flat parameter.
    fused.lm_head._parameters["weight"] = fused.lm_head.weight * 1
    assert type(fused(tokens)) is torch.Tensor


def test_transforms_compute_logits():
    stock, fused = pair()
    x = torch.randn(3, 16, dtype=torch.float32)
    want = torch.func.vmap(stock.lm_head)(x)
    torch.testing.assert_close(torch.func.vmap(fused.lm_head)(x), want)
