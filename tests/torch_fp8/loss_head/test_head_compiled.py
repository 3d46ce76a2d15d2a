"""Loss heads in graphs of torch.compile: the loss is an operator, and logits are not computed."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from transformers.modeling_outputs import CausalLMOutputWithPast

import torch_fp8
from tests.internals import LazyLogits, defer_logits, logit_losses, return_losses, sqnr_db
from tests.torch_fp8.loss_head.compiled_graphs import Graphs
from tests.torch_fp8.loss_head.logits_cases import (
    LOSSES,
    V,
    batch,
    is_fused,
    pair,
    small_chunks,
    step,
)
from torch_fp8 import FP8Config, convert_to_float8, revert

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    small_chunks(monkeypatch)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class WithLoss(nn.Module):
    """A model that returns its loss and its logits, as those of transformers do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, labels=None):
        logits = self.model(tokens)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))
        return {"loss": loss, "logits": logits}


def _run(model, compute, tokens, labels):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = compute(tokens, labels)
    loss.backward()
    return loss.detach(), [p.grad.float() for p in model.parameters()]


def _assert_alike(got, want, db=45):
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    assert len(got[1]) == len(want[1])
    for grad, expected in zip(got[1], want[1], strict=True):
        assert sqnr_db(expected, grad) >= (28 if grad.shape == (16, 16) else db)


def _returns_loss(model, step):
    """Return a step that is to be compiled, and whose graph returns no logits of `model`."""
    return_losses(model, step)
    return step


PLAIN = ("masked", "shifted", "two losses")
"""Losses in whose graphs logits are computed. A graph does not know the number of rows of a mask.
Dynamo replaces nn.CrossEntropyLoss() in a traced function, and takes the plain logits.
"""
FUSED = [name for name in LOSSES if name not in PLAIN]


# A graph of several losses costs little more than one of a single loss.
@pytest.mark.parametrize("names", [*(FUSED[i::4] for i in range(4)), *zip(PLAIN)], ids="+".join)
def test_a_step_in_one_graph_has_no_logits(names):
    if "masked" in names and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 cannot trace the stock loss")

    def loss(model, x, y):
        # Weights that differ show a loss or a gradient that stands in another's place.
        return sum((1 + i) * LOSSES[name](model(x), y) for i, name in enumerate(names))

    stock, fused = pair(bias="flat" in names, tied="float" in names)
    data, graphs = batch(), Graphs()
    want = _run(stock, lambda x, y: loss(stock, x, y), *data)
    compiled = graphs.compile(_returns_loss(fused, lambda x, y: loss(fused, x, y)))
    _assert_alike(_run(fused, compiled, *data), want)
    assert is_fused(graphs.numel) == (names[0] not in PLAIN)
    assert graphs.count == 1


def _steps(model, compute, read):
    """Return losses, and what `read` makes of the logits after each of three optimizer steps."""
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.5), []
    for seed in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            output = compute(*batch(seed))
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append((output["loss"].detach(), read(output["logits"])))
    return results


def _compiled(model):
    """Return the graphs of a model with its loss, and what torch.compile returns for it."""
    graphs = Graphs()
    compiled = graphs.compile(model)
    defer_logits(compiled)
    return graphs, compiled


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_returned_logits_are_those_of_their_forward_also_after_a_step(tied, copied):
    stock, fused = map(WithLoss, pair(tied=tied))
    graphs, compiled = _compiled(copy.deepcopy(fused) if copied else fused)
    want = _steps(stock, stock, lambda z: z.argmax(-1))
    got = _steps(compiled, compiled, lambda z: z.argmax(-1))
    for (loss, best), (stock_loss, stock_best) in zip(got, want, strict=True):
        torch.testing.assert_close(loss, stock_loss, rtol=1e-4, atol=0)
        assert (best == stock_best).float().mean() > 0.97
    assert is_fused(graphs.numel)
    assert graphs.count == 1


def test_returned_logits_are_uncomputed_tensors():
    stock, fused = map(WithLoss, pair())
    tokens, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        want = stock(tokens, labels)["logits"]
        logits = _compiled(fused)[1](tokens, labels)["logits"]
    assert type(logits) is LazyLogits
    assert (logits.shape, logits.dtype) == (want.shape, want.dtype)
    assert torch.equal(logits, want)


def test_returned_logits_have_the_autocast_state_of_their_forward():
    class Autocasting(WithLoss):
        def forward(self, *data):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(*data)

    stock, fused = map(Autocasting, pair())
    want, got = stock(*batch())["logits"], _compiled(fused)[1](*batch())["logits"]
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["dict", "tuple", "tensor", "CausalLMOutputWithPast"])
def test_every_form_of_output(name):
    form = {"dict": dict, "CausalLMOutputWithPast": CausalLMOutputWithPast}.get(name)

    class Returning(WithLoss):
        def forward(self, tokens, labels=None):
            output = super().forward(tokens, labels)
            if name == "tensor":
                return output["logits"].float() * 2
            return tuple(output.values()) if form is None else form(**output)

    stock, fused = map(Returning, pair())
    _, compiled = _compiled(fused)
    tokens, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        want, got = stock(tokens, labels), compiled(tokens, labels)
    if name == "tensor":
        want, got = [want], [got]
    elif form is not None:
        assert type(got) is type(want)
        want, got = list(want.values()), list(got.values())
    assert type(got[-1]) is LazyLogits
    torch.testing.assert_close(got[-1] + 0, want[-1], rtol=0, atol=0)
    assert len(got) == len(want)


def test_an_output_without_logits_stays_the_same_object():
    class Returning(WithLoss):
        def forward(self, tokens, labels=None):
            return self.output

    _, fused = pair()
    model = Returning(fused).eval()
    model.output = CausalLMOutputWithPast(loss=torch.zeros(()))
    compiled = torch.compile(model, backend="eager")
    defer_logits(compiled)
    with torch.compiler.set_stance("force_eager"):
        assert compiled(batch()[0]) is model.output


def _in_place(graphs, model):
    model.compile(backend=graphs.backend, fullgraph=True)
    return model


def _forward_alone(graphs, model):
    model.forward = graphs.compile(model.forward)
    return model


def _unpickled(graphs, model):
    return graphs.compile(pickle.loads(pickle.dumps(model)))


WAYS = {
    "torch.compile": Graphs.compile,
    "Module.compile": _in_place,
    "the forward": _forward_alone,
    "of a copy": lambda graphs, model: graphs.compile(copy.deepcopy(model)),
    "of a shallow copy": lambda graphs, model: graphs.compile(copy.copy(model)),
    "of a pickled model": _unpickled,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_of_its_own_that_compiles_after_the_conversion(way):
    stock, fused = pair()
    graphs = Graphs()
    compiled, data = WAYS[way](graphs, fused), batch()
    want = _run(stock, lambda x, y: LOSSES["float"](stock(x), y), *data)
    got = _run(compiled, lambda x, y: LOSSES["float"](compiled(x), y), *data)
    _assert_alike(got, want)
    assert graphs.count == 1
    assert is_fused(graphs.numel) == (way != "of a pickled model")


def test_a_method_that_replaces_the_forward_after_the_conversion_runs():
    _, fused = pair()

    class Halving(type(fused)):
        def forward(self, tokens):
            return super().forward(tokens) / 2

    with torch.autocast("cpu", torch.bfloat16):
        whole = fused(batch()[0])
        fused.__class__ = Halving
        for call in (fused, Graphs().compile(fused)):
            assert torch.equal(call(batch()[0]), whole / 2)


def test_a_model_around_a_converted_one_returns_plain_logits(monkeypatch):
    monkeypatch.setattr(logit_losses, "linear_cross_entropy", None)
    stock, fused = map(WithLoss, pair())
    graphs = Graphs()
    torch_fp8.autograd.current_pass.warn_once.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        want = stock(*batch())
        with pytest.warns(UserWarning, match="'lm_head' are in memory in a graph.* 8,192 bytes"):
            got = graphs.compile(fused)(*batch())
    assert type(got["logits"]) is torch.Tensor
    assert torch.equal(got["logits"], want["logits"])
    assert torch.equal(got["loss"], want["loss"])


def test_a_part_that_is_compiled_alone_returns_uncomputed_logits():
    stock, fused = map(WithLoss, pair())
    graphs = Graphs()
    fused.model = graphs.compile(fused.model)
    return_losses(fused, WithLoss.forward)
    want = _run(stock, lambda *data: stock(*data)["loss"], *batch())
    _assert_alike(_run(fused, lambda *data: fused(*data)["loss"], *batch()), want)
    assert is_fused(graphs.numel)


def test_a_program_s_function_gets_a_gradient_of_logits_that_left_a_graph():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            return logits * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    stock, fused = pair()
    compiled = Graphs().compile(fused)
    want = _run(stock, lambda x, y: LOSSES["float"](Double.apply(stock(x)), y), *batch())
    got = _run(fused, lambda x, y: LOSSES["float"](Double.apply(compiled(x)), y), *batch())
    _assert_alike(got, want)


def test_a_graph_around_a_compiled_model():
    stock, fused = map(WithLoss, pair())
    graphs, inner = Graphs(), torch.compile(fused, backend="eager")
    defer_logits(inner)
    outer = graphs.compile(lambda *data: dict(inner(*data)))
    tokens, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        want, got = stock(tokens, labels), outer(tokens, labels)
    torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-5, atol=0)
    assert torch.equal(got["logits"], want["logits"])


def test_revert_takes_everything_back():
    _, fused = pair()
    compiled = torch.compile(fused, backend="eager")
    assert "forward" in vars(fused)
    revert(fused)
    assert "forward" not in vars(fused)
    assert type(fused.lm_head) is nn.Linear
    tokens, _ = batch()
    assert type(compiled(tokens)) is torch.Tensor


def test_a_model_that_was_compiled_before_it_is_converted():
    stock, plain = pair()
    revert(plain)
    compiled = Graphs().compile(plain)
    convert_to_float8(compiled, FP8Config("tensorwise"))
    with torch.autocast("cpu", torch.bfloat16):
        loss = LOSSES["float"](compiled(batch()[0]), batch()[1])
        want = LOSSES["float"](stock(batch()[0]), batch()[1])
    assert plain.lm_head.loss_head.fused == 1
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)


def test_both_losses_add_their_gradients():
    stock, fused = map(WithLoss, pair())

    def compute(model):
        def both(tokens, labels):
            output = model(tokens, labels)
            return output["loss"] + output["logits"].float().square().mean()

        return both

    data = batch()
    want = _run(stock, compute(stock), *data)
    _assert_alike(_run(fused, compute(_compiled(fused)[1]), *data), want, db=40)


def _penalised(model):
    def compute(tokens, labels):
        logits = model(tokens)
        loss = LOSSES["float"](logits, labels)
        with torch.no_grad():
            right = (logits.argmax(-1) == labels).float().mean()
        return loss + 1e-4 * logits.float().logsumexp(-1).square().mean() + right

    return compute


def _written(model):
    def compute(tokens, labels):
        logits = model(tokens) * 1
        view, clone = logits.view(-1, V), logits.float()
        logits[..., 0] = -1.0
        return LOSSES["flat"](view, labels) + clone[..., 0].square().mean()

    return compute


def _part_is_written(model):
    def compute(tokens, labels):
        logits = model(tokens) * 1
        logits.select(-1, 0).zero_()
        return LOSSES["flat"](logits, labels)

    return compute


@pytest.mark.parametrize("program", [_penalised, _written, _part_is_written])
def test_other_reads_and_writes_in_a_graph_are_stocks(program):
    stock, fused = pair()
    data = batch()
    want = _run(stock, program(stock), *data)
    compiled = Graphs().compile(_returns_loss(fused, program(fused)))
    _assert_alike(_run(fused, compiled, *data), want)


def test_an_autograd_function_in_a_graph_gets_plain_logits():
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, labels):
            ctx.save_for_backward(logits, labels)
            return F.cross_entropy(logits.float().view(-1, V), labels.view(-1))

        @staticmethod
        def backward(ctx, grad):
            logits, labels = ctx.saved_tensors
            p = logits.float().softmax(-1)
            p = p - F.one_hot(labels.clamp(min=0), V)
            return ((labels >= 0)[..., None] * p * grad / (labels >= 0).sum()).to(
                logits.dtype
            ), None

    stock, fused = pair()
    data = batch()
    want = _run(stock, lambda x, y: Loss.apply(stock(x), y), *data)
    compute = _returns_loss(fused, lambda x, y: Loss.apply(fused(x), y))
    _assert_alike(_run(fused, Graphs().compile(compute), *data), want, db=40)


def test_evaluation_returns_plain_logits():
    stock, fused = (WithLoss(m).eval() for m in pair())
    tokens, labels = batch()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = stock(tokens, labels)
        got = _compiled(fused)[1](tokens, labels)
    assert type(got["logits"]) is torch.Tensor
    torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-5, atol=0)


def test_batches_of_every_length_use_one_graph():
    _, fused = pair()
    model, graphs = WithLoss(fused), Graphs()
    compute = _returns_loss(fused, lambda *data: model(*data)["loss"])
    compiled = graphs.compile(compute, dynamic=True)
    for length in (24, 16, 31):
        tokens, labels = batch(shape=(4, length))
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(tokens, labels)
            torch.testing.assert_close(loss, model(tokens, labels)["loss"], rtol=1e-6, atol=0)
        loss.backward()
    assert graphs.count == 1
    assert is_fused(graphs.numel)


def test_a_compiled_loss_runs_eagerly_on_uncomputed_logits():
    stock, fused = pair()
    compiled = torch.compile(LOSSES["float"], backend="aot_eager")
    want, want_grads, _ = step(stock, LOSSES["float"])
    loss, grads, numel = step(fused, compiled)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    assert is_fused(numel)
    assert grads.keys() == want_grads.keys()
