"""An output layer beside the same one with uncomputed logits, and the largest tensor of a step."""

import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import ForCausalLMLoss

from tests.internals import logit_losses, sqnr_db
from torch_fp8 import FP8Config, convert_to_float8

V, H, CHUNK = 4096, 16, 16
SHAPE = (4, 24)


class LanguageModel(nn.Module):
    """Hidden states (B, S) -> logits (B, S, V), with a layer in between that runs in FP8."""

    def __init__(self, bias=False, tied=False, classes=V):
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.inner = nn.Linear(H, H)
        self.lm_head = nn.Linear(H, classes, bias=bias)
        nn.init.normal_(self.lm_head.weight, std=0.5)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.lm_head(x + self.inner(x.detach()))


def small_chunks(monkeypatch):
    """Fuse with chunks of 16 tokens, so that a chunk is far smaller than all logits."""
    for name in ("linear_cross_entropy", "linear_log_probs"):
        chunked = functools.partial(getattr(logit_losses, name), chunk=CHUNK)
        monkeypatch.setattr(logit_losses, name, chunked)


def pair(seed=0, dtype=torch.float32, change=None, **options):
    """Return the same model, which `change` may write, without and with uncomputed logits."""
    torch.manual_seed(seed)
    model = LanguageModel(**options).to(dtype)
    if change is not None:
        change(model)
    models = []
    for loss_head in ("off", "bf16"):
        models.append(copy.deepcopy(model))
        convert_to_float8(models[-1], FP8Config("tensorwise", loss_head=loss_head))
    return models


def batch(seed=0, shape=SHAPE):
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(0, V, shape, generator=generator) for _ in range(2))
    labels[0, :3] = -100
    return tokens, labels


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor with memory that an operator returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                self.numel = max(self.numel, x.numel())
        return results


def is_fused(numel, shape=SHAPE):
    """Return whether no tensor had a value for each token and class."""
    return numel < shape[0] * (shape[1] - 1) * V


def step(model, loss_of, autocast=True, **data):
    """Return the loss, the gradients by name, and the largest tensor of a step."""
    tokens, labels = batch(**data)
    model.zero_grad()
    with Largest() as largest:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model(tokens), labels)
        loss.backward()
    grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, largest.numel


def assert_like_stock(stock, fused, loss_of, db=45, rtol=1e-5, **options):
    """Compare loss and gradients with stock's; return the largest tensors of both steps.

    45 dB: gradients of the logits are rounded to BF16 once in stock's and once in ours.
    """
    want, want_grads, want_numel = step(stock, loss_of, **options)
    loss, grads, numel = step(fused, loss_of, **options)
    assert loss.dtype == want.dtype
    torch.testing.assert_close(loss, want, rtol=rtol, atol=0)
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        least = 28 if name.startswith("inner") else db  # its wgrad is in FP8
        assert sqnr_db(want_grads[name], grad) >= least, name
    return want_numel, numel


def flat_loss(logits, labels, **options):
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), **options)


def shifted_loss(logits, labels):
    logits = logits[..., :-1, :].contiguous()
    return nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), labels[..., 1:].reshape(-1))


def _class_weights(logits, labels):
    weight = torch.linspace(0.5, 2, V, dtype=torch.float32)
    return flat_loss(logits.float(), labels, weight=weight)


LOSSES = {
    "flat": flat_loss,
    "float": lambda z, y: flat_loss(z.float(), y),
    "to float32": lambda z, y: flat_loss(z.to(torch.float32), y),
    "to the same device": lambda z, y: flat_loss(z.to("cpu", torch.float32), y),
    "type": lambda z, y: flat_loss(z.type(torch.float32), y),
    "shifted": shifted_loss,
    "sliced": lambda z, y: F.cross_entropy(z[:, :-1].reshape(-1, V), y[:, 1:].flatten()),
    "flattened": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "transposed": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "permuted": lambda z, y: F.cross_entropy(torch.permute(z, (0, 2, 1)), y),
    "masked": lambda z, y: F.cross_entropy(z[y >= 0], y[y >= 0]),
    "one sequence": lambda z, y: F.cross_entropy(z.reshape(1, -1, V)[0], y.flatten()),
    "cloned": lambda z, y: flat_loss(z.clone(), y),
    "sum over a count": lambda z, y: flat_loss(z.float(), y, reduction="sum") / 71,
    "smoothed": lambda z, y: flat_loss(z, y, label_smoothing=0.1),
    "another ignored label": lambda z, y: flat_loss(z, y.clamp(min=7), ignore_index=7),
    "weights of classes": _class_weights,
    "no label ignored": lambda z, y: flat_loss(z, y.clamp(min=0)),
    "scaled by a power of two": lambda z, y: flat_loss(z * 0.0625, y),
    "divided": lambda z, y: flat_loss((z / 8).float(), y),
    "transformers": lambda z, y: ForCausalLMLoss(z, y, V),
    "transformers, num_items_in_batch": lambda z, y: ForCausalLMLoss(
        z, y, V, num_items_in_batch=torch.tensor(80)
    ),
    "transformers, shift_labels": lambda z, y: ForCausalLMLoss(z, None, V, shift_labels=y),
    "log_softmax and nll_loss": lambda z, y: F.nll_loss(
        F.log_softmax(z, dim=-1, dtype=torch.float32).view(-1, V), y.view(-1)
    ),
    "LogSoftmax and NLLLoss": lambda z, y: nn.NLLLoss(reduction="sum")(
        nn.LogSoftmax(2)(z.float()).transpose(1, 2), y
    ),
    "two losses": lambda z, y: flat_loss(z, y) + 0.5 * shifted_loss(z, y),
}
