import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.internals import RECIPES, saves_nothing
from tests.steps import assert_equal
from tests.torch_fp8.block_models import Block
from torch_fp8 import FP8Config, convert_to_float8


def _block(**options):
    torch.manual_seed(0)
    block = Block().bfloat16()
    convert_to_float8(block, FP8Config(**options))
    return block


def _x():
    return torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def _run(model, function):
    """Output and gradients of ``function(x)``."""
    x = _x().requires_grad_()
    y = function(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return y.detach(), x.grad, grads


class _Casts(TorchDispatchMode):
    """For each of our operators that casts: its name and the FP8 payloads that it makes."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.namespace == "torch_fp8":
            results = made if isinstance(made, tuple) else (made,)
            payloads = [tuple(t.shape) for t in results if t.element_size() == 1 and t.numel()]
            self.made.append((func._schema.name.removeprefix("torch_fp8::"), payloads))
        return made


@pytest.mark.parametrize("options", [{"save_activations": "bf16"}, {"wgrad": "bf16"}, {}], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_without_checkpointing(recipe, options):
    plain = _block(recipe=recipe, **options)
    recomputed = copy.deepcopy(plain)
    for early_stop in (True, False):
        want = _run(plain, plain)
        with set_checkpoint_early_stop(early_stop):
            got = _run(recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=False))
        assert_equal(want, got)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(recomputed.named_buffers())[name]), name


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_the_first_pass_casts_what_forward_takes_and_no_more(recipe):
    block = _block(recipe=recipe)
    with _Casts() as first:
        y = checkpoint(block, _x().requires_grad_(), use_reentrant=False)
    for name, payloads in first.made:
        # (tokens, features) or a weight, never a transpose, never what is saved beside a payload
        assert len(payloads) <= 1, (name, payloads)
        assert all(shape[1] in (64, 176) and shape[0] in (64, 176) for shape in payloads)
    operands = [payload for _, payloads in first.made for payload in payloads]
    assert len(operands) == 7 + 4  # weights; q, k and v share one input, gate and up another
    with _Casts() as second:
        y.sum().backward()
    in_recomputation = [p for name, p in second.made if name.startswith(("rms", "swiglu_q"))]
    assert any(len(payloads) > 1 for payloads in in_recomputation)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("where", ["inside", "outside", "both"])
def test_hooks_of_offloading_get_what_is_there(recipe, where):
    plain = _block(recipe=recipe)
    recomputed = copy.deepcopy(plain)
    packed = []

    def pack(t):
        packed.append(t)
        return t.clone()

    def offloaded(x):
        with saved_tensors_hooks(pack, lambda t: t):
            return recomputed(x)

    def run(x):
        inner = recomputed if where == "outside" else offloaded
        if where == "inside":
            return checkpoint(inner, x, use_reentrant=False)
        with save_on_cpu():
            return checkpoint(inner, x, use_reentrant=False)

    want = _run(plain, plain)
    assert_equal(want, _run(recomputed, run))
    assert all(0 not in t.stride() or t.numel() == 1 for t in packed)
    assert (where == "outside") == (not packed)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_nested_checkpoints(recipe):
    plain = _block(recipe=recipe)
    recomputed = copy.deepcopy(plain)

    class Nested(nn.Module):
        def forward(self, x):
            normed = recomputed.attn_norm(x)
            x = x + checkpoint(recomputed.attention, normed, use_reentrant=False)

            def mlp(x):
                return recomputed.mlp(recomputed.mlp_norm(x))

            return x + checkpoint(mlp, x, use_reentrant=False)

    want = _run(plain, plain)
    assert_equal(want, _run(recomputed, lambda x: checkpoint(Nested(), x, use_reentrant=False)))
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(recomputed.named_buffers())[name]), name


def test_where_hooks_cannot_be_seen_everything_is_made(monkeypatch):
    class NoAutograd:
        pass

    monkeypatch.setattr(torch._C, "_autograd", NoAutograd())
    assert not saves_nothing()
