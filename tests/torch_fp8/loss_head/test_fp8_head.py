"""The head's three products in FP8: sums of rows, factors of tokens, memory and casts."""

import pytest
import torch
import torch.nn.functional as F

from tests.fp8_checkpoints import LiveStorages
from tests.internals import LogitForm, LossTerms
from tests.torch_fp8.loss_head.heads import BF16, Head, decibels
from torch_fp8 import linear_cross_entropy, linear_log_probs
from torch_fp8.ops import cross_entropy, head_products
from torch_fp8.ops.linear_cross_entropy import HeadOptions, linear_softmax_loss

CLASSES = 128256
SPREADS = {"flat": 2.0**-9, "uneven": 0.125, "half at one class": 0.29, "peaked": 1.0}
"""Factors of the logits: between them, a class has all or a 128,000th of the probability."""


class Powers:
    """A head of powers of two, which FP8 represents exactly, so that only the gradient is rounded.

    Feature 0 is 1 in each weight: its gradient of a hidden state is the sum of a row.
    """

    def __init__(self, tokens=12, features=16, classes=CLASSES):
        generator = torch.Generator().manual_seed(0)

        def powers(*shape):
            sign = torch.randint(2, shape, generator=generator) * 2 - 1
            return sign * 2.0 ** -torch.randint(3, shape, generator=generator)

        self.hidden, weight = powers(tokens, features), powers(classes, features) / 4
        weight[:, 0] = 1
        self.labels = torch.randint(classes, (tokens,), generator=generator)
        peaks = torch.where(torch.arange(tokens) % 2 == 0, self.labels, classes - 1 - self.labels)
        weight[peaks, 1:] = 4 * self.hidden[:, 1:].sign()
        self.weight = weight

    def gradients(self, compute, dtype=torch.float32):
        tensors = [t.to(dtype).requires_grad_() for t in (self.hidden, self.weight)]
        return torch.autograd.grad(compute(*tensors), tensors)


@pytest.mark.parametrize("spread", SPREADS)
def test_sums_of_rows_and_the_mean_gradient_are_those_of_float64(spread):
    head, scale = Powers(), SPREADS[spread]

    def ours(hidden, weight):
        options = {"reduction": "sum", "precision": "fp8", "logit_scale": scale}
        return linear_cross_entropy(hidden, weight, head.labels, **options)

    def stock(hidden, weight):
        return F.cross_entropy(F.linear(hidden, weight) * scale, head.labels, reduction="sum")

    of_hidden, of_weight = head.gradients(ours)
    want_hidden, want = head.gradients(stock, torch.float64)
    largest = want_hidden.abs().amax()
    assert want_hidden[:, 0].abs().amax() <= 1e-9 * largest
    assert of_hidden[:, 0].abs().amax() <= 1e-3 * scale
    error = (of_weight.double() - want).mean(0).abs()
    assert (error <= 1e-3 * want.abs().mean(0)).all()
    others = torch.ones(CLASSES, dtype=torch.bool).index_fill(0, head.labels, False)
    size = want[others].abs().sum()  # of what all other classes get together
    assert abs(of_weight[others].abs().sum() - size) <= (1e-3 if spread == "flat" else 0.03) * size
    assert decibels(of_weight, want) >= 24


def test_a_factor_of_ten_thousand_overflows_nothing_and_hides_no_token():
    head = Head(tokens=64, classes=3000)
    head.labels.clamp_(min=0)
    factor = torch.ones(64)
    factor[5], factor[9] = 1e4, -1e4

    def compute(precision):
        options = {"reduction": "none", "precision": precision}
        return linear_cross_entropy(*head.tensors[:2], head.labels, head.bias, **options) * factor

    _, want = head.run(lambda: compute("bf16"))
    _, grads = head.run(lambda: compute("fp8"))
    rows = [decibels(*pair) for pair in zip(grads[0], want[0], strict=True)]
    assert min(rows) >= 20, "tokens with small factors, too"
    assert decibels(grads[1], want[1]) >= 24
    labels = [decibels(grads[1][i], want[1][i]) for i in head.labels[:5].tolist()]
    assert min(labels) >= 12, "the rows of their labels, beside the noise of the large factors"


@pytest.mark.parametrize("largest", [1e-4, 1e4])
def test_weights_of_classes_change_the_scale(largest):
    head = Head()
    weights = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * largest
    options = {"class_weight": weights, "label_smoothing": 0.1, "reduction": "sum"}

    def compute(precision):
        tensors = (*head.tensors[:2], head.labels, head.bias)
        return linear_cross_entropy(*tensors, precision=precision, **options)

    _, want = head.run(lambda: compute("bf16"))
    _, grads = head.run(lambda: compute("fp8"))
    assert min(decibels(*pair) for pair in zip(grads, want, strict=True)) >= 24


def test_entropies_are_bounded():
    """The gradient of an entropy exceeds 1: its bound grows with the logarithm of the classes."""
    head = Head(tokens=32, classes=2**15)
    head.labels.clamp_(min=0)
    with torch.no_grad():
        head.bias[7] += 16  # about half of the probability

    def compute(precision):
        options = {"entropy": True, "precision": precision}
        return linear_log_probs(*head.tensors[:2], head.labels, head.bias, **options)[1]

    _, want = head.run(lambda: compute("bf16"))
    _, grads = head.run(lambda: compute("fp8"))
    assert min(decibels(*pair) for pair in zip(grads, want, strict=True)) >= 17


def test_a_diverged_gradient_is_visible():
    for value in (float("inf"), float("nan")):
        head = Head(tokens=20)
        head.labels.clamp_(min=0)

        def compute(value=value, head=head):
            options = {"reduction": "none", "precision": "fp8"}
            loss = linear_cross_entropy(*head.tensors[:2], head.labels, **options)
            return (loss * torch.where(torch.arange(20) == 3, value, 1.0)).sum()

        grads = torch.autograd.grad(compute(), head.tensors[:2])
        assert not grads[0][3].isfinite().any()
        assert not grads[1].isfinite().all()


@pytest.mark.parametrize("shape", [(100, 64, 1003), (33, 40, 72), (16, 24, 7)], ids=str)
def test_sizes_that_tensor_cores_do_not_take_are_padded(shape):
    head = Head(*shape)
    _, want = head.run(head.stock)
    options = {"precision": "fp8", "chunk": 48}
    tensors = *head.tensors[:2], head.labels, head.bias
    _, grads = head.run(lambda: linear_cross_entropy(*tensors, **options))
    assert min(decibels(*pair) for pair in zip(grads, want, strict=True)) >= 22


def test_the_weight_is_cast_once_for_all_chunks(monkeypatch):
    casts, cast = [], head_products.quantize_layouts

    def recorded(x, options):
        casts.append((tuple(x.shape), options.rowwise, options.columnwise))
        return cast(x, options)

    monkeypatch.setattr(head_products, "quantize_layouts", recorded)
    head = Head()
    linear_cross_entropy(*head.tensors[:2], head.labels, precision="fp8", chunk=32)
    assert casts[:2] == [((1000, 64), True, True), ((100, 64), True, False)]
    assert casts[2:] == [((rows, 64), False, True) for rows in (32, 32, 32, 4)]


def test_the_scale_is_a_constant_where_the_gradient_is_bounded(monkeypatch):
    scales, quantize = [], head_products.cross_entropy_quantize

    def recorded(*args):
        scales.append(float(args[3]))
        return quantize(*args)

    monkeypatch.setattr(head_products, "cross_entropy_quantize", recorded)
    head = Head()
    tensors, options = (*head.tensors[:2], head.labels), {"precision": "fp8"}
    for more in ({}, {"label_smoothing": 0.1}, {"num_items_in_batch": 3}, {"reduction": "sum"}):
        linear_cross_entropy(*tensors, **options, **more)
    linear_cross_entropy(*tensors, logit_scale=1 / 16, **options)
    assert scales == [2.0**-15] * 4 + [2.0**-19]
    weights = torch.full((1000,), 5.0)
    linear_cross_entropy(*tensors, class_weight=weights, reduction="sum", **options)
    assert scales[-1] == 4 * 2.0**-15  # 2.5, since 1/1 is split into 0.5 and 2


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_at_most_one_chunk_of_logits_and_a_float32_gradient_are_in_memory(fp8, frozen, monkeypatch):
    monkeypatch.setattr(head_products, "_STEP", 2**14)  # small beside this weight, too
    monkeypatch.setattr(cross_entropy, "_PART", 2**15)
    tokens, features, classes, chunk = 320, 32, 10000, 128
    head, ones = Head(tokens, features, classes), torch.ones(tokens)
    head.labels.clamp_(min=0)
    options = HeadOptions(BF16, -100, fp8, True, False, True, not frozen, False, chunk)
    operands = head.hidden.detach(), head.weight.detach(), None, None
    with torch.no_grad(), LiveStorages() as live:
        for x in (*operands[:2], head.labels, ones):
            x.detach()
        before = live.alive
        arguments = (LossTerms(head.labels, ones, ones), LogitForm(), options)
        results = linear_softmax_loss.reference(*operands, *arguments)
    assert (results[4] is None) == frozen
    layouts = (1 if frozen else 2) if fp8 else 0
    logits = chunk * classes * (2 + layouts)
    of_weight = classes * features * ((0 if frozen else 4) + (2 if fp8 else 0))
    assert logits + of_weight <= live.peak - before <= logits + of_weight + 2**20
