"""Losses and gradients in chunks equal stock's of all logits."""

import warnings

import pytest
import torch
import torch.distributed.tensor
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_fp8
from tests.internals import split_parameter
from tests.torch_fp8.loss_head.heads import BF16, Head, decibels
from torch_fp8 import linear_cross_entropy, linear_log_probs
from torch_fp8.ops import head_products
from torch_fp8.ops.linear_cross_entropy import HeadOptions

WEIGHTS = torch.rand(1000, generator=torch.Generator().manual_seed(1)) * 2
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "of tokens": {"reduction": "none", "label_smoothing": 0.1},
    "items": {"num_items_in_batch": 77},
    "items in a tensor": {"num_items_in_batch": torch.tensor(77)},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 10.0},
    "factor": {"logit_scale": 1 / 3},
    "factor and softcap": {"logit_scale": 2.0, "softcap": 30.0},
    "classes": {"class_weight": WEIGHTS},
    "classes and smoothing": {"class_weight": WEIGHTS, "label_smoothing": 0.2},
    "classes of tokens": {"class_weight": WEIGHTS, "reduction": "none"},
    "another label is ignored": {"ignore_index": 7},
}


@pytest.fixture(autouse=True)
def _stock_products(stock_bf16_products):
    """The products of stock and ours are the same operator with the same operands."""


def ours(head, **options):
    options = {"chunk": 48, **options}
    return linear_cross_entropy(*head.tensors[:2], head.labels, head.bias, **options)


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_gradients_equal_stocks(name, dtype):
    head, options = Head(dtype=dtype), OPTIONS[name]
    if options.get("ignore_index") is not None:
        head.labels[::7] = 7
    want, want_grads = head.run(lambda: head.stock(**options), grad=0.5)
    for chunk in (48, 112):  # three chunks, and one
        loss, grads = head.run(lambda c=chunk: ours(head, chunk=c, **options), grad=0.5)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
        for got, expected, tensor in zip(grads, want_grads, head.tensors, strict=True):
            assert got.dtype == tensor.dtype
            assert decibels(got, expected) >= (100 if dtype == torch.float32 else 45)


def test_a_gradient_of_the_loss_multiplies_in_float32():
    """1/3 is no BF16 number: rounded first, it would be off by 2^-9 in all elements."""
    head = Head()
    third, whole = (head.run(lambda: ours(head), grad=g)[1] for g in (1 / 3, 1.0))
    for got, want in zip(third, whole, strict=True):
        assert torch.equal(got, (want.float() / 3).to(BF16))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_entropies(temperature):
    head = Head()
    head.labels.clamp_(min=0)
    factor = torch.linspace(-1, 1, 100)

    def both(log_p, entropy):
        return torch.stack([log_p * factor, entropy * 0.3])

    def stock():
        log_p = head.logits(temperature=temperature).log_softmax(-1)
        chosen = log_p.gather(1, head.labels[:, None])[:, 0]
        return both(chosen, -(log_p.exp() * log_p).sum(-1))

    def chunks():
        options = {"temperature": temperature, "entropy": True, "chunk": 48}
        return both(*linear_log_probs(*head.tensors[:2], head.labels, head.bias, **options))

    (want, want_grads), (got, grads) = head.run(stock), head.run(chunks)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert min(decibels(*pair) for pair in zip(grads, want_grads, strict=True)) >= 45


def test_entropies_alone_and_log_probabilities_alone_have_gradients():
    head = Head(dtype=torch.float32)
    head.labels.clamp_(min=0)
    tensors = (*head.tensors[:2], head.labels, head.bias)
    log_p = head.logits().log_softmax(-1)
    wants = log_p.gather(1, head.labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    got = linear_log_probs(*tensors, entropy=True)
    for i in range(2):
        want = torch.autograd.grad(wants[i].sum(), head.tensors, retain_graph=True)
        grads = torch.autograd.grad(got[i].sum(), head.tensors, retain_graph=True)
        assert min(decibels(*pair) for pair in zip(grads, want, strict=True)) >= 100
    assert torch.equal(got[0], linear_log_probs(*tensors))


def test_more_dimensions_and_strides_are_those_of_stock():
    """A shifted view of a batch, a head that is a transposed matrix, and 1,003 classes."""
    head = Head(tokens=96, classes=1003)
    batch = head.hidden.detach().view(4, 24, 64).requires_grad_()
    weight = head.weight.detach().t().contiguous().t().requires_grad_()
    labels = head.labels.view(4, 24)[:, 1:]
    assert not weight.is_contiguous()
    results = []
    for chunked in (True, False):
        shifted = batch[:, :-1]
        if chunked:
            loss = linear_cross_entropy(shifted, weight, labels, chunk=48)
            per_token = linear_cross_entropy(shifted, weight, labels, reduction="none")
        else:
            logits = F.linear(shifted, weight).float().reshape(-1, 1003)
            loss = F.cross_entropy(logits, labels.reshape(-1))
            per_token = F.cross_entropy(logits, labels.reshape(-1), reduction="none").view(4, 23)
        results.append((loss, per_token, *torch.autograd.grad(loss, [batch, weight])))
    (loss, tokens, *grads), (want, want_tokens, *want_grads) = results
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    torch.testing.assert_close(tokens, want_tokens, rtol=1e-5, atol=1e-6)
    assert min(decibels(*pair) for pair in zip(grads, want_grads, strict=True)) >= 45


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_token_and_no_label_give_stocks_losses_and_zero_gradients(reduction):
    for head in (Head(tokens=0), Head(tokens=20)):
        head.labels.fill_(-100)
        want, want_grads = head.run(lambda head=head: head.stock(reduction=reduction))
        for precision in ("bf16", "fp8"):
            options = {"reduction": reduction, "precision": precision}
            loss, grads = head.run(lambda head=head, options=options: ours(head, **options))
            assert torch.equal(loss.nan_to_num(5), want.nan_to_num(5))
            for got, expected in zip(grads, want_grads, strict=True):
                assert torch.equal(got, expected)
                assert not got.any()


def test_labels_that_are_no_class_raise_stocks_error():
    for label in (1000, -1, -99):
        head = Head()
        head.labels[40] = label
        for compute in (head.stock, lambda head=head: ours(head)):
            with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
                compute()
        with pytest.raises(IndexError, match="out of bounds"):
            linear_log_probs(*head.tensors[:2], head.labels.clamp(min=-1))


def test_probabilities_and_float64_are_stocks_with_a_warning():
    head = Head(dtype=torch.float32)
    soft = torch.rand(100, 1000).softmax(-1)
    with pytest.warns(UserWarning, match="labels are probabilities, so a loss is computed from"):
        loss = linear_cross_entropy(*head.tensors[:2], soft, head.bias)
    assert torch.equal(loss, F.cross_entropy(head.logits(), soft))
    head = Head(dtype=torch.float64)
    with pytest.warns(UserWarning, match="hidden states are torch.float64"):
        loss = ours(head)
    want = F.cross_entropy(F.linear(*head.tensors), head.labels)
    assert torch.equal(loss, want)
    assert loss.dtype == torch.float64


def test_what_stock_refuses_is_refused():
    head, other = Head(), Head(dtype=torch.float32)
    hidden, weight, labels = *head.tensors[:2], head.labels
    for args, options in (
        ((other.hidden, weight, labels), {}),  # dtypes
        ((hidden, weight, labels, other.bias), {}),
        ((hidden, weight[:, :32], labels), {}),
        ((hidden, weight, labels[:50]), {}),
        ((hidden, weight, labels.int()), {}),
        ((hidden, weight, labels), {"class_weight": WEIGHTS[:10]}),
        ((hidden, weight, labels), {"label_smoothing": 1.5}),
        ((hidden, weight, labels), {"reduction": "average"}),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            linear_cross_entropy(*args, **options)
    for options in ({"precision": "fp4"}, {"chunk": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            linear_cross_entropy(hidden, weight, labels, **options)
    with pytest.raises(ValueError, match="num_items_in_batch replaces"):
        linear_cross_entropy(hidden, weight, labels, num_items_in_batch=3, reduction="sum")
    with pytest.raises(ValueError, match="temperature must be positive"):
        linear_log_probs(hidden, weight, labels, temperature=0.0)


def test_a_sharded_head_is_refused_by_name(single_process_group):
    head = Head()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    weight = torch.distributed.tensor.distribute_tensor(
        head.weight.detach(), mesh, [torch.distributed.tensor.Shard(0)]
    )
    with pytest.raises(ValueError, match=r"`weight` is a DTensor with .*Shard.*full_tensor\(\)"):
        linear_cross_entropy(head.hidden, weight, head.labels)


def test_float32_under_autocast_is_stocks():
    head = Head(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        want, want_grads = head.run(head.stock)
        loss, grads = head.run(lambda: ours(head))
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    for got, expected in zip(grads, want_grads, strict=True):
        assert got.dtype == torch.float32
        assert decibels(got, expected) >= 45


def test_a_weight_in_two_halves_multiplies_by_its_bf16_half():
    head = Head(dtype=torch.float32)
    weight = torch.nn.Parameter(head.weight.detach().clone())
    half = split_parameter(weight).halves.high.clone().requires_grad_()
    hidden = head.hidden.detach().to(BF16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, head.labels)
        want = linear_cross_entropy(hidden, half, head.labels)
    loss.backward()
    want.backward()
    assert torch.equal(loss, want)
    assert torch.equal(weight.grad.stored, half.grad)
    exact = linear_cross_entropy(head.hidden, weight, head.labels)
    plain = linear_cross_entropy(head.hidden, weight.dequantize(), head.labels)
    assert torch.equal(exact, plain)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_head_frozen_in_fp8_has_no_gradient_of_its_own(recipe, precision):
    head = Head()
    model = torch.nn.Sequential(torch.nn.Linear(64, 1008, bias=False, dtype=BF16))
    model[0].weight.requires_grad_(False)
    torch_fp8.convert_to_float8(model, torch_fp8.FP8Config(recipe=recipe, frozen_weights="fp8"))
    torch_fp8.freeze(model)
    weight = model[0].weight
    hidden = head.hidden.detach().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, head.labels, precision=precision)
    want_hidden = head.hidden.detach().requires_grad_()
    want = linear_cross_entropy(want_hidden, weight.dequantize(), head.labels)
    loss.backward()
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-5 if precision == "bf16" else 2e-3, atol=0)
    assert decibels(hidden.grad, want_hidden.grad) >= (45 if precision == "bf16" else 22)
    assert weight.grad is None


def test_gradients_are_computed_only_where_they_are_needed(monkeypatch):
    from tests.internals import loss_function as module

    asked, compute = [], module.linear_softmax_loss

    def recorded(*args):
        asked.append(args[-1][5:8])
        return compute(*args)

    monkeypatch.setattr(module, "linear_softmax_loss", recorded)
    head = Head()
    with torch.no_grad():
        ours(head)
        linear_log_probs(*head.tensors[:2], head.labels.clamp(min=0))
    linear_cross_entropy(head.hidden, head.weight.detach(), head.labels)
    linear_cross_entropy(head.hidden.detach(), head.weight, head.labels)
    nothing = (False, False, False)
    assert asked == [nothing, nothing, (True, False, False), (False, True, False)]


def test_a_checkpoint_computes_gradients_in_its_second_pass_alone(monkeypatch):
    from torch.utils.checkpoint import checkpoint

    from tests.internals import loss_function as module

    asked, compute = [], module.linear_softmax_loss

    def recorded(*args):
        asked.append(args[-1].wants_gradient)
        return compute(*args)

    head = Head()
    _, want = head.run(lambda: ours(head))
    monkeypatch.setattr(module, "linear_softmax_loss", recorded)
    _, grads = head.run(lambda: checkpoint(lambda h: ours(head), head.hidden, use_reentrant=False))
    assert asked == [False, True]
    assert all(torch.equal(*pair) for pair in zip(grads, want, strict=True))


@pytest.mark.parametrize(("chunk", "number"), [(32, 1), (112, 0)], ids=["chunks", "one chunk"])
def test_the_gradient_of_the_weight_is_in_float32_once(chunk, number, monkeypatch):
    monkeypatch.setattr(head_products, "_STEP", 2**12)  # else a part is the whole
    head, storages = Head(), []
    wide = head.tensors[1].shape, torch.float32

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor) and (x.shape, x.dtype) == wide:
                    storages.append(x.untyped_storage())  # alive, so that none is reused
            return result

    with Wide():
        loss = ours(head, chunk=chunk)
        loss.backward()
    assert len({storage.data_ptr() for storage in storages}) == number
    assert decibels(head.weight.grad, head.run(head.stock)[1][1]) >= 45


def test_a_second_backward_computes_the_same_gradients():
    head = Head()
    loss = ours(head)
    first, again = (
        torch.autograd.grad(loss * g, head.tensors, retain_graph=True) for g in (0.5, 0.5)
    )
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_gradients_are_refused_by_name(reduction):
    head = Head()
    loss = ours(head, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="linear_cross_entropy and linear_log_probs cannot be"):
        torch.autograd.grad(loss, head.hidden, create_graph=True)


def test_in_high_precision_gradients_have_gradients():
    head = Head(dtype=torch.float32)
    second = []
    for compute in (head.stock, lambda: ours(head)):
        with torch_fp8.high_precision(), warnings.catch_warnings():
            warnings.simplefilter("error")
            (grad,) = torch.autograd.grad(compute(), head.hidden, create_graph=True)
        second.append(torch.autograd.grad(grad.square().sum(), head.weight)[0])
    assert torch.equal(*second)


def test_transforms_of_torch_func_are_stocks():
    head = Head(dtype=torch.float32)
    with pytest.warns(UserWarning, match="torch.func, torch.export or a tracer runs the forward"):
        got = torch.func.grad(lambda h: linear_cross_entropy(h, head.weight, head.labels))(
            head.hidden.detach()
        )
    want = torch.func.grad(lambda h: F.cross_entropy(h @ head.weight.t(), head.labels))(
        head.hidden.detach()
    )
    assert decibels(got.detach(), want.detach()) >= 100


def test_masked_classes_have_no_gradient():
    """A bias of -inf excludes a class; its gradient is 0 in stock, too."""
    head = Head(dtype=torch.float32)
    with torch.no_grad():
        head.bias[::3] = -torch.inf
        head.labels[head.labels >= 0] = head.labels[head.labels >= 0] // 3 * 3 + 1
    want, want_grads = head.run(head.stock)
    loss, grads = head.run(lambda: ours(head))
    torch.testing.assert_close(loss, want)
    assert min(decibels(*pair) for pair in zip(grads, want_grads, strict=True)) >= 100
    log_p, entropy = linear_log_probs(
        *head.tensors[:2], head.labels.clamp(1), head.bias, entropy=True
    )
    assert entropy.isfinite().all()
    assert all(
        g.isfinite().all() for g in torch.autograd.grad((log_p + entropy).sum(), head.hidden)
    )


def test_chunks_are_long_and_about_equal():
    options = HeadOptions(BF16, -100, False, True, False, False, False, False, 0)
    assert options.tokens(16384, 128256) == 4096
    assert options.tokens(16384, 256000) == 2048
    assert options.tokens(5000, 128256) == 2512
    assert options.tokens(100, 128256) == 112
    assert options.tokens(0, 128256) == 1
