"""Training steps of small models that tests share: what they return, call and save."""

import io

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.saved_activations import count_saved
from torch_fp8 import Monitor, convert_optimizer, convert_to_float8


def gaussian(*shape, dtype=torch.bfloat16, seed=1):
    """The same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def train(model, x):
    """Output, gradient of x and gradients of the parameters by name."""
    x = x.clone().requires_grad_()
    y = model(x)
    (y.float() * gaussian(*y.shape, dtype=torch.float32, seed=2)).sum().backward()
    return y.detach(), x.grad, {n: p.grad for n, p in model.named_parameters()}


def adamw(model, config, **options):
    """AdamW over a model, both converted, and the report of the optimizer's conversion."""
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    convert_to_float8(model, config)
    return optimizer, convert_optimizer(optimizer, config, model=model)


def through_a_file(value, weights_only=False):
    """What `torch.load` makes of a file with a value."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def token_loss(model, step):
    """The loss of a model of tokens on the batch of a step, under autocast."""
    tokens = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.bfloat16):
        return model(tokens).float().square().mean()


def train_steps(model, optimizer, steps, first=0, loss_of=token_loss):
    """The losses of steps, the first of which has this number."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def renew_scales(*parameters):
    """A step of an optimizer, which renews the scales of delayed scaling and writes nothing.

    Layers that ran in a graph are known by their parameters alone.
    """
    torch.optim.SGD(parameters or [torch.zeros(1, requires_grad=True)], lr=0.0).step()


def assert_equal(want, got):
    """Of `train`, to the bit."""
    assert torch.equal(want[0], got[0])
    assert torch.equal(want[1], got[1])
    for name, grad in want[2].items():
        assert (grad is None) == (got[2][name] is None), name
        assert grad is None or torch.equal(grad, got[2][name]), name


class Calls(TorchDispatchMode):
    """Names of our operators but GEMMs, in the order of their calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torch_fp8" and func is not torch.ops.torch_fp8.scaled_mm.default:
            self.names.append(func._schema.name.removeprefix("torch_fp8::"))
        return func(*args, **(kwargs or {}))


def saved_bytes(model, x):
    """Bytes that a forward saves for backward, parameters, histories and x left out."""
    with count_saved([x, *model.parameters(), *model.buffers()]) as saved:
        y = model(x)
    y.sum().backward()
    return saved.total


def same(a, b):
    """Whether two states are equal: tensors in all bits, in containers of the same form."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def monitored(model, optimizer, config, logged, **options):
    """A monitor that writes the series of each step into `logged`."""
    return Monitor(
        model, [optimizer], config, log=lambda s, step: logged.update({step: s}), **options
    )
