"""The kernels of softmax losses on a card, and the head's results against those of the CPU."""

import pytest
import torch

from tests.torch_fp8.loss_head import loss_cases
from tests.torch_fp8.loss_head.heads import BF16, Head, decibels
from torch_fp8 import linear_cross_entropy, linear_log_probs
from torch_fp8.ops import cross_entropy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_kernels_equal_their_references(dtype):
    shapes = (*loss_cases.SHAPES, (130, 33000))
    loss_cases.check_everything(cross_entropy, "cuda", (dtype,), shapes)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_heads_equal_those_of_the_cpu(precision, reduction):
    head, results = Head(tokens=300, features=128, classes=5000), []
    for device in ("cpu", "cuda"):
        tensors = [t.detach().to(device).requires_grad_() for t in head.tensors]
        hidden, weight, bias = tensors
        options = {"reduction": reduction, "precision": precision, "chunk": 128}
        loss = linear_cross_entropy(hidden, weight, head.labels.to(device), bias, **options)
        log_p, entropy = linear_log_probs(
            hidden, weight, head.labels.to(device).clamp(min=0), entropy=True, precision=precision
        )
        grads = torch.autograd.grad(loss.sum() + log_p.mean() + entropy.mean(), tensors)
        results.append([t.cpu() for t in (loss.detach(), log_p.detach(), entropy.detach(), *grads)])
    (loss, log_p, entropy, *grads), (card_loss, card_log_p, card_entropy, *card_grads) = results
    for got, want in ((card_loss, loss), (card_log_p, log_p), (card_entropy, entropy)):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-2)
    for got, want in zip(card_grads, grads, strict=True):
        assert decibels(got, want) >= (40 if precision == "bf16" else 20)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_no_more_than_a_chunk_of_logits_is_in_memory(precision):
    head = Head(tokens=4096, features=256, classes=32000)
    tensors = [t.detach().cuda().requires_grad_() for t in head.tensors[:2]]
    labels = head.labels.cuda()
    linear_cross_entropy(tensors[0][:1024], tensors[1], labels[:1024], precision=precision)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(*tensors, labels, precision=precision, chunk=1024)
    chunk = 1024 * 32000 * (4 if precision == "fp8" else 2)
    rest = 32000 * 256 * (4 + 2 + 2) + 16 * 2**20
    assert torch.cuda.max_memory_allocated() - before <= chunk + rest
    loss.backward()
