"""Loss heads of models and steps whose graphs break, keep logits, or are seen by hooks."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import graph_break
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from tests.internals import defer_logits, return_losses, sqnr_db
from tests.torch_fp8.loss_head.compiled_graphs import Graphs
from tests.torch_fp8.loss_head.logits_cases import V, batch, is_fused, pair, small_chunks
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    small_chunks(monkeypatch)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _cross_entropy(logits, labels):
    return F.cross_entropy(logits.float().view(-1, V), labels.view(-1))


def _run(model, compute):
    """Return the loss, the gradients and the number of graphs of two equal steps."""
    torch._dynamo.reset()
    counters.clear()
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = compute(*batch())
        loss.backward()
    grads = [p.grad.float() for p in model.parameters()]
    return loss.detach(), grads, counters["stats"]["unique_graphs"]


def _assert_alike(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    for grad, expected in zip(got[1], want[1], strict=True):
        assert sqnr_db(expected, grad) >= (28 if grad.shape == (16, 16) else 45)
    assert got[2] == want[2] > 0


class Model(nn.Module):
    """A model with its loss, whose graph breaks at one place."""

    def __init__(self, model, place):
        super().__init__()
        self.model, self.place = model, place
        self.kept = None

    def forward(self, tokens, labels):
        if self.place == "before":
            graph_break()
        logits = self._inside(tokens)
        if self.place == "between":
            graph_break()
        loss = _cross_entropy(logits, labels)
        if self.place == "after":
            graph_break()
        if self.place == "detached":
            self.kept = logits.detach()
        if self.place == "kept":
            self.kept = logits
        return {"loss": loss, "logits": logits}

    def _inside(self, tokens):
        if self.place == "inside":
            graph_break()
        return self.model(tokens)


PLACES = ["none", "before", "inside", "between", "after", "detached", "kept"]


@pytest.mark.parametrize("place", PLACES)
def test_a_compiled_model_whose_graph_breaks(place):
    stock, fused = (Model(m, place) for m in pair())
    compiled = []
    for model in (stock, fused):
        compiled.append(torch.compile(model, backend="aot_eager"))
        defer_logits(compiled[-1])
    results, logits = [], []
    for model, call in zip((stock, fused), compiled, strict=True):
        results.append(_run(model, lambda *data, call=call: call(*data)["loss"]))
        with torch.autocast("cpu", torch.bfloat16):
            logits.append(call(*batch())["logits"].float())
        if model.kept is not None:
            assert type(model.kept) is torch.Tensor
            assert torch.equal(model.kept.argmax(-1), logits[-1].argmax(-1))
    _assert_alike(*reversed(results))
    assert sqnr_db(*logits) > 45


@pytest.mark.parametrize("place", PLACES)
def test_a_compiled_step_whose_graph_breaks(place):
    results, metrics = [], []
    for model in pair():
        module = Model(model, place)

        def step(tokens, labels, module=module):
            output = module.forward(tokens, labels)
            if place in ("detached", "kept"):
                return output["loss"]
            metrics.append(None)
            graph_break()
            metrics[-1] = (output["logits"].argmax(-1) == labels).float().mean()
            return output["loss"]

        return_losses(module, step)
        results.append(_run(module, torch.compile(step, backend="aot_eager")))
        if module.kept is not None:
            assert type(module.kept) is torch.Tensor
            metrics.append((module.kept.argmax(-1) == batch()[1]).float().mean())
    _assert_alike(*reversed(results))
    assert metrics[0] == metrics[-1]


def test_the_rest_of_a_step_after_a_break_has_no_logits():
    _, fused = pair()

    def step(tokens, labels):
        graph_break()
        return _cross_entropy(fused(tokens), labels)

    return_losses(fused, step)
    graphs = Graphs()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(step, backend=graphs.backend)(*batch())
    assert graphs.count == 1
    assert is_fused(graphs.numel)


@pytest.mark.parametrize("step", [None, functools.partial(_cross_entropy)])
def test_a_step_that_is_no_function_changes_nothing(step):
    _, fused = pair()
    return_losses(fused, step)
    logits = torch.compile(lambda tokens: fused(tokens), backend="aot_eager")(batch()[0])
    assert type(logits) is torch.Tensor


def test_hooks_of_a_compiled_model_see_logits():
    results = []
    for model in pair():
        model.register_forward_hook(lambda module, args, output: output * 0.5)
        compiled = torch.compile(model, backend="aot_eager")
        results.append(_run(model, lambda x, y, call=compiled: _cross_entropy(call(x), y))[:2])
    _assert_alike(*((*result, 1) for result in reversed(results)))  # ours runs the hook eagerly


def test_a_hook_of_a_compiled_model_s_backward():
    results = []
    for model in pair():
        compiled, grads = torch.compile(model, backend="aot_eager"), []

        def compute(tokens, labels, call=compiled, grads=grads):
            logits = call(tokens)
            logits.register_hook(grads.append)
            return _cross_entropy(logits, labels)

        results.append(_run(model, compute))
        results[-1][1].append(grads[0].float())
    _assert_alike(*reversed(results))


def test_a_function_that_is_compiled_registers_a_hook_of_uncomputed_logits():
    _, fused = pair()
    grads = []
    register = torch.compile(lambda x: x.register_hook(grads.append), backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        logits = fused(batch()[0])
        register(logits)
        _cross_entropy(logits, batch()[1]).backward()
    assert grads[0].shape == logits.shape


def test_logits_of_a_graph_are_plain_for_the_next_graph():
    _, fused = pair()

    def step(tokens, labels):
        return fused(tokens)

    return_losses(fused, step)
    logits = torch.compile(step, backend="aot_eager")(*batch())
    assert type(logits) is torch.Tensor
    assert not hasattr(logits, "recorded")
    labels = batch()[1]
    loss = torch.compile(_cross_entropy, backend="aot_eager", fullgraph=True)(logits, labels)
    loss.backward()
    assert all(p.grad is not None for p in fused.parameters())


def _llama(config, checkpoints=False):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", vocab_size=V, **sizes, **heads)
    ).train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    convert_to_float8(model, config)
    return model


def test_detached_logits_that_a_step_keeps_next_to_weights_in_two_halves():
    config, kept = FP8Config("tensorwise", opt_level="O2"), []
    model = _llama(config)
    convert_optimizer(torch.optim.AdamW(model.parameters()), config, model=model)

    def step(tokens, labels):
        output = model(input_ids=tokens, labels=labels)
        kept.append(output.logits.detach())
        return output.loss

    return_losses(model, step)
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.compile(step, backend="aot_eager", fullgraph=True)(*batch())
        want = model(input_ids=batch()[0], labels=batch()[1])
    assert type(kept[0]) is torch.Tensor
    assert torch.equal(kept[0], want.logits)
    torch.testing.assert_close(loss, want.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "options", [{"use_cache": True}, {"output_hidden_states": True}], ids=["warning", "capturing"]
)
def test_models_of_transformers_whose_graphs_break(options):
    """Activation checkpointing warns of the cache, and hidden states are captured with a lock."""
    results = []
    for loss_head in ("off", "bf16"):
        model = _llama(FP8Config("tensorwise", loss_head=loss_head), "use_cache" in options)
        call = torch.compile(model, backend="aot_eager")
        defer_logits(call)

        def compute(tokens, labels, call=call):
            output = call(input_ids=tokens, labels=labels, **options)
            return output.loss + output.logits.float().logsumexp(-1).square().mean() * 1e-4

        results.append(_run(model, compute))
    _assert_alike(*reversed(results))
