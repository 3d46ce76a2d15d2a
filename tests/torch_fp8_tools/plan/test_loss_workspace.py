"""What a plan knows of the memory within the loss head, which no operator returns."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.internals import MemoryTracker
from torch_fp8 import linear_cross_entropy

TOKENS, FEATURES, CLASSES = 8192, 64, 32000
CHUNK = 4096 * CLASSES
BF16 = torch.bfloat16


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_chunk_of_logits_is_in_the_peak(precision):
    with FakeTensorMode():
        hidden = torch.empty(TOKENS, FEATURES, dtype=BF16, requires_grad=True)
        weight = torch.empty(CLASSES, FEATURES, dtype=BF16, requires_grad=True)
        labels = torch.empty(TOKENS, dtype=torch.int64)
        with MemoryTracker([weight]) as tracker:
            linear_cross_entropy(hidden, weight, labels, precision=precision).backward()
    of_logits = 2 * CHUNK if precision == "bf16" else 4 * CHUNK  # and E5M2 in two layouts
    gradient = 4 * weight.numel()  # float32
    assert of_logits + gradient < tracker.peak_total < of_logits + gradient + 12 * weight.numel()
    assert tracker.total < of_logits
