import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

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
