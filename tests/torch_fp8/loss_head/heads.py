"""Random output layers, losses that stock computes of them, and comparisons."""

import torch
import torch.nn.functional as F

BF16 = torch.bfloat16


def decibels(got, want):
    """Return the signal-to-noise ratio of `got`, in dB."""
    got, want = got.double(), want.double()
    return float(10 * torch.log10(want.square().sum() / (got - want).square().sum()))


class Head:
    """Hidden states, weight, bias and labels, of which every seventh is ignored."""

    def __init__(self, tokens=100, features=64, classes=1000, dtype=BF16, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape, scale=1.0):
            x = torch.randn(*shape, generator=generator) * scale
            return x.to(dtype).requires_grad_()

        self.hidden = randn(tokens, features)
        self.weight = randn(classes, features, scale=3 * features**-0.5)
        self.bias = randn(classes)
        self.labels = torch.randint(classes, (tokens,), generator=generator)
        self.labels[::7] = -100

    @property
    def tensors(self):
        return self.hidden, self.weight, self.bias

    def logits(self, logit_scale=1.0, softcap=None, temperature=1.0):
        x = F.linear(self.hidden, self.weight, self.bias)
        x = x if logit_scale == 1 else x * logit_scale
        x = x if softcap is None else torch.tanh(x / softcap) * softcap
        return (x if temperature == 1 else x / temperature).float()

    def stock(self, *, logit_scale=1.0, softcap=None, num_items_in_batch=None, **options):
        """Return what stock computes for the options of `linear_cross_entropy`."""
        options["weight"] = options.pop("class_weight", None)
        if num_items_in_batch is not None:
            options["reduction"] = "sum"
        loss = F.cross_entropy(self.logits(logit_scale, softcap), self.labels, **options)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def run(self, compute, grad=1.0):
        """Return a loss, and the gradients of its sum times `grad`."""
        loss = compute()
        grads = torch.autograd.grad(loss.sum() * grad, self.tensors)
        return loss.detach(), grads
