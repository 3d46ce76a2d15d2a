import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import bench_memory
from benchmarks.shapes import TOY_LLAMA
from tests.internals import Float8Grad, MemoryTracker, plain_parts

KIB = 1024


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_the_peak_is_what_lived_at_once(fake):
    with _mode(fake), MemoryTracker() as tracker:
        a = torch.empty(256)  # 1 KiB
        b = torch.empty(512)
        del a
        c = torch.empty(256)
        assert tracker.total == 3 * KIB
        d = b.view(2, 256)[0]  # no memory of its own
        del b, c
        assert tracker.total == 2 * KIB
        del d
    assert tracker.total == 0
    assert tracker.peak["workspace"] == 3 * KIB


def _mode(fake):
    return FakeTensorMode() if fake else contextlib.nullcontext()


def test_saved_tensors_and_gradients_have_their_categories():
    layer = nn.Linear(64, 128, bias=False)
    x = torch.randn(32, 64)
    tracker = MemoryTracker(layer.parameters())
    tracker.assign(layer.weight, "weights")
    tracker.peak = dict(tracker.current)
    weight = 64 * 128 * 4
    with tracker:
        y = layer(x).exp()  # x and y are saved
        assert tracker.current["saved activations"] == x.nbytes + y.nbytes
        y.sum().backward()
        del y
    assert tracker.current["weights"] == weight
    assert tracker.current["gradients"] == weight
    assert tracker.current["workspace"] == 0
    assert tracker.current["saved activations"] == x.nbytes  # the caller's
    assert sum(tracker.peak.values()) >= 2 * weight + x.nbytes
    layer.weight.grad = None
    assert tracker.current["gradients"] == 0


def test_a_wrapper_counts_by_what_it_holds():
    gradient = Float8Grad.quantize(torch.randn(64, 64))
    tracker = MemoryTracker()
    tracker.assign(gradient, "gradients")
    assert tracker.total == 64 * 64 + 64 * 2 + 4
    assert len(plain_parts(gradient)) == 3


@pytest.mark.parametrize("variant", ["bf16-mixed", "O2"])
def test_a_step_without_memory_holds_what_a_real_one_holds(variant):
    """Keys and values of grouped heads were counted repeated, for a mask that no run makes."""
    case, device = bench_memory.Case("toy", variant, False, 2, 64), torch.device("cpu")

    def after_forward(model):
        tokens = torch.ones(2, 64, dtype=torch.int64)
        optimizer = bench_memory.optimizer_for(case, model, device)
        bench_memory.train_step(model, optimizer, tokens, device)
        tracker = MemoryTracker(model.parameters())
        bench_memory.assign_standing(tracker, model, optimizer)
        with tracker, torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            assert loss.requires_grad
            return tracker.total

    model = bench_memory.meta_model(case, TOY_LLAMA)
    with bench_memory.without_memory():
        model.to_empty(device=device)
        model.tie_weights()
        counted = after_forward(model)
    model = bench_memory.causal_lm(TOY_LLAMA, bench_memory.PLAIN, device)
    bench_memory.convert(model, case)
    assert counted == after_forward(model)
