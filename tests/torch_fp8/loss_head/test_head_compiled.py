"""Loss heads and torch.compile: logits inside a graph, none outside."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from tests.torch_fp8.loss_head.logits_cases import (
    V,
    assert_like_stock,
    batch,
    is_fused,
    pair,
    small_chunks,
)

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    small_chunks(monkeypatch)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _loss(logits, labels):
    return F.cross_entropy(logits.float().view(-1, V), labels.view(-1))


def test_a_compiled_model_computes_its_logits_in_one_graph():
    results = []
    for model in pair():
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        tokens, labels = batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model(tokens), labels)
        loss.backward()
        results.append((loss.detach(), model.lm_head.weight.grad))
        assert not counters["graph_break"]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert model.lm_head.loss_head.fused == 0


def test_a_compiled_loss_runs_eagerly_on_uncomputed_logits():
    stock, fused = pair()
    compiled = torch.compile(_loss, backend="aot_eager")
    numel = assert_like_stock(stock, fused, lambda z, y: (compiled if _lazy(z) else _loss)(z, y))
    assert is_fused(numel[1])


def _lazy(logits):
    return type(logits).__name__ == "LazyLogits"


def test_a_head_behind_a_compiled_part_is_fused():
    stock, fused = pair()
    fused.inner.forward = torch.compile(fused.inner.forward, backend="aot_eager")
    assert is_fused(assert_like_stock(stock, fused, _loss)[1])
