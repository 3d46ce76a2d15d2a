"""Attention's output, saved once with the layer that casts it."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.attention import CASES, DIM, HEADS, TOKENS, Attention, operands, replace_kernels
from tests.saved_activations import LiveBytes, count_saved
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.quantization.metrics import sqnr_db

QKV, QKVO = (FP8Config(opt_level="O1", save_attention=s) for s in ("qkv", "qkvo"))
NUMEL = 2 * TOKENS * HEADS * DIM


class _Block:
    """Attention and the layer behind it."""

    def __init__(self, config=QKVO, case="sdpa", between=lambda out: out):
        self.case, (kind, implementation, self.kwargs) = case, CASES[case]
        if "mask" in self.kwargs and self.kwargs["mask"].ndim == 2:
            self.kwargs = {"mask": self.kwargs["mask"][None, None]}
        self.attention, self.between = Attention(kind, implementation, config), between
        self.attention.module.o_proj.to(torch.bfloat16)

    def __enter__(self):
        self.attention.__enter__()
        return self

    def __exit__(self, *exception):
        self.attention.__exit__()

    def outputs(self, tensors):
        """Attention's (B, S, H, D), and the layer's (B, S, N)."""
        out = self.attention(*tensors, **self.kwargs)
        rows = self.between(out).flatten(2).contiguous()
        return out, self.attention.module.o_proj(rows)

    def __call__(self, *tensors):
        return self.outputs(tensors)[1]

    def gradients(self, tensors):
        """Those of attention alone, for a gradient of its output; the layer has taken that."""
        out, y = self.outputs(tensors)
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
        assert y.requires_grad
        if self.case == "padding":  # no loss reads what stands there
            g[0, :30] = 0
        return torch.autograd.grad(out, tensors, g)


def _gradients(config, tensors, case="sdpa", **options):
    with _Block(config, case, **options) as block:
        return block.gradients(tensors)


def _are_equal(some, others):
    return all(map(torch.equal, some, others))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"])
@pytest.mark.parametrize("case", ["sdpa", "padding", "sliding window", "flex", "flash"])
def test_gradients_keep_25_db(case, recipe, monkeypatch):
    """Products of E4M3 with E4M3 keep 28.5; k takes part in two, and the output in one more."""
    replace_kernels(monkeypatch)
    exact = [t.float() for t in operands(torch.bfloat16)]
    with monkeypatch.context() as off:
        off.setattr(Attention, "__enter__", lambda self: self)
        off.setattr(Attention, "__exit__", lambda self: None)
        stock = Attention(*CASES[case][:2])
        stock.module.o_proj = nn.Identity()
        block = _Block(case=case)
        block.attention = stock
        want = block.gradients([t.detach().requires_grad_() for t in exact])
    shared = FP8Config(opt_level="O1", save_attention="qkvo", recipe=recipe)
    alone = FP8Config(opt_level="O1", save_attention="qkv", recipe=recipe)
    got = _gradients(shared, operands(torch.bfloat16), case)
    decibels = [sqnr_db(*pair) for pair in zip(want, got, strict=True)]
    assert min(decibels) > 25, decibels
    *others, value = _gradients(alone, operands(torch.bfloat16), case)
    assert not any(map(torch.equal, others, got))  # the output that backward reads is rounded
    assert torch.equal(value, got[2])


@pytest.mark.parametrize("case", ["sdpa", "padding", "flex", "flash"])
def test_the_output_is_not_there_twice(case, monkeypatch):
    replace_kernels(monkeypatch)
    live = {}
    for config in (QKV, QKVO):
        tensors = operands(torch.bfloat16)
        with _Block(config, case) as block, LiveBytes() as mode:
            y = block(*tensors)
            live[config.save_attention] = mode.total
            y.sum().backward()
    assert live["qkv"] - live["qkvo"] == 2 * NUMEL


def test_queries_of_any_layout_share_the_output():
    """Models that normalize q have it by head, and kernels lay their output as q lies."""
    live = {}
    for config in (QKV, QKVO):
        q, k, v = operands(torch.bfloat16)
        with _Block(config) as block, LiveBytes() as mode:
            y = block(q.contiguous(), k, v)  # (B, H, S, D) in memory
            live[config.save_attention] = mode.total
            del y
    assert live["qkv"] - live["qkvo"] == 2 * NUMEL


def test_hooks_around_see_one_byte_an_element():
    tensors = operands(torch.bfloat16)
    with _Block() as block, count_saved([*tensors, block.attention.module.o_proj.weight]) as saved:
        block(*tensors)
    assert {t.dtype for t in saved.tensors if t.numel() == NUMEL} == {torch.float8_e4m3fn}
    assert sum(t.numel() == NUMEL for t in saved.tensors) == 2  # q, and the output


def test_offloaded_tensors_come_back():
    want = _gradients(QKVO, operands(torch.bfloat16))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        got = _gradients(QKVO, operands(torch.bfloat16))
    assert _are_equal(want, got)


def test_a_checkpoint_keeps_the_output_as_it_is():
    grads = []
    for config, run in ((QKV, None), (QKVO, checkpoint)):
        tensors = operands(torch.bfloat16)
        with _Block(config) as block:
            y = block(*tensors) if run is None else run(block, *tensors, use_reentrant=False)
            y.sum().backward()
        grads.append([t.grad for t in tensors])
    assert _are_equal(*grads)


def test_a_checkpoint_behind_attention_fills_it_in_backward():
    """The first pass of a checkpoint makes no payload."""
    tensors = operands(torch.bfloat16)
    grads = []
    for run in (lambda layer, x: layer(x), lambda *a: checkpoint(*a, use_reentrant=False)):
        with _Block() as block:
            out = block.attention(*tensors)
            y = run(block.attention.module.o_proj, out.flatten(2))
            grads.append(torch.autograd.grad(y.sum(), tensors))
    assert _are_equal(*grads)


@pytest.mark.parametrize(
    "between",
    [lambda out: out * 1, lambda out: out.flip(0), lambda out: out.narrow(1, 0, TOKENS - 1)],
    ids=["operator", "copy", "part"],
)
def test_what_no_layer_has_cast_stays_as_it_is(between):
    tensors = operands(torch.bfloat16)
    want = _gradients(QKV, tensors, between=between)
    assert _are_equal(want, _gradients(QKVO, tensors, between=between))


def test_an_output_that_was_written_to_is_refused():
    tensors = operands(torch.bfloat16)
    with _Block(between=lambda out: out.mul_(1)) as block:
        y = block(*tensors)
        with pytest.raises(RuntimeError, match="modified by an in-place operation"):
            y.sum().backward()


def test_a_layer_that_keeps_no_payload_shares_nothing():
    tensors = operands(torch.bfloat16)
    with _Block(FP8Config(opt_level="O1", save_attention="qkvo", wgrad="bf16")) as block:
        want = block.gradients(tensors)
    with _Block() as block:
        block.attention.module.o_proj.weight.requires_grad_(False)
        got = block.gradients(tensors)
    assert _are_equal(want, _gradients(QKV, tensors))
    assert _are_equal(want, got)


def test_the_graph_can_run_twice_and_goes_when_it_is_dropped():
    tensors = operands(torch.bfloat16)
    with _Block() as block:
        y = block(*tensors).sum()
        first = torch.autograd.grad(y, tensors, retain_graph=True)
        assert _are_equal(first, torch.autograd.grad(y, tensors))
        gc.disable()
        try:
            with LiveBytes() as mode:
                tensors = [t * 1 for t in tensors]
                block(*tensors)  # views of the weights, which are there anyway
                before = mode.total
                y = block(*tensors)
                assert mode.total > before + NUMEL
                del y
                assert mode.total == before
        finally:
            gc.enable()


def test_float32_comes_back_in_float32():
    tensors = operands(torch.float32)
    with _Block() as block:
        block.attention.module.o_proj.float()
        grads = block.gradients(tensors)
    assert {g.dtype for g in grads} == {torch.float32}


def test_the_summary_counts_outputs():
    module = Attention().module
    both = nn.ModuleList([module, Attention().module])
    both[1].o_proj.requires_grad_(False)
    report = convert_to_float8(both, QKVO)
    assert (report.attention, report.shared_outputs) == (("0", "1"), ("0",))
    text = str(report)
    assert "attention 1 module with the output saved once in FP8" in text
    assert "attention 1 module with the output saved unchanged: no layer" in text
    assert convert_to_float8(both, QKV).shared_outputs == ()
    convert_to_float8(both, FP8Config(opt_level="O1"))
