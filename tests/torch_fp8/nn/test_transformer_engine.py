import copy
import pickle
import sys
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

import torch_fp8
from tests.internals import (
    Float8Grad,
    ReleasedGrad,
    SplitWeight,
    TransformerEngineLinear,
    sqnr_db,
    transformer_engine,
)
from tests.steps import adamw, gaussian, train_steps
from torch_fp8 import FP8Config, convert_to_float8, revert
from torch_fp8.distributed import Float8ColwiseParallel, connect_fsdp

TE = FP8Config(backend="transformer-engine", opt_level="O1")
FP32, BF16, CUDA = torch.float32, torch.bfloat16, torch.device("cuda")
IS_CUDA = transformer_engine._is_cuda
RECIPES = ("tensorwise", "delayed", "blockwise")


class Model(nn.Module):
    """An embedding tied to lm_head, layers of 4,096 elements and more, two with the same weight."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(48, width)
        self.up, self.middle = nn.Linear(width, 128), nn.Linear(128, 128, bias=False)
        self.again, self.down = nn.Linear(128, 128), nn.Linear(128, width)
        self.again.weight = self.middle.weight
        self.lm_head = nn.Linear(width, 48, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.up(self.embed(tokens)).relu()
        x = x + self.again(self.middle(x).relu())
        return self.lm_head(self.down(x))


def layers(model):
    return [m for m in model.modules() if isinstance(m, TransformerEngineLinear)]


def batch(step, tokens=7):
    return torch.randint(48, (3, tokens), generator=torch.Generator().manual_seed(step))


def token_loss(model, step, bf16=False):
    tokens = batch(step, 5 + step).to(model.embed.weight.device)
    with torch.autocast(tokens.device.type, BF16, enabled=bf16):
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())


def agrees(ours, theirs):
    return (ours.float() - theirs.float()).norm() <= 1e-5 * theirs.float().norm()


def recorded(monkeypatch, te, what, method="forward"):
    """What ``what(layer, arguments, output)`` returns of each call of a method of ``te.Linear``."""
    seen, original = [], getattr(te.Linear, method)

    def recording(self, *args, **options):
        output = original(self, *args, **options)
        seen.append(what(self, args, output))
        return output

    monkeypatch.setattr(te.Linear, method, recording)
    return seen


def run_both(*layers, x, grad, dtype=None):
    """Output, gradients of input, weight and bias of layers, under autocast to a dtype if any."""
    results = []
    for layer in layers:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = layer(leaf)
        y.backward(grad)
        results.append((y, leaf.grad, layer.weight.grad, layer.bias.grad))
    return results


def train(model, steps=4, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **options)
    return train_steps(model, optimizer, steps, loss_of=token_loss), optimizer


@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_as_a_stock_model_with_its_parameters_and_becomes_one(te, recipe):
    model = Model()
    model.up.weight.requires_grad_(False)
    stock, parameters = copy.deepcopy(model), list(model.parameters())
    report = convert_to_float8(model, FP8Config(recipe=recipe, backend="transformer-engine"))
    assert report.converted == ("up", "middle", "again", "down")
    assert report.skipped == (("lm_head", "skip='lm_head'"),)
    losses, optimizer = train(model, momentum=0.9)
    assert losses == pytest.approx(train(stock, momentum=0.9)[0], rel=1e-5)
    assert [*map(id, model.parameters())] == [*map(id, parameters)]
    assert not model.up.weight.requires_grad
    assert torch.equal(model.up.weight, stock.up.weight)
    assert set(optimizer.state) == {p for p in parameters if p.requires_grad}
    for layer in layers(model):  # what Transformer Engine multiplies and asks for requires_grad
        assert layer.fp8.engine.linear.weight is layer.weight
        assert layer.bias is None or layer.fp8.engine.linear.bias is layer.bias
    assert [revert(model), revert(model)] == [4, 0]
    for ours, their in zip(model.modules(), stock.modules(), strict=True):
        assert type(ours) is type(their)
        assert ours.__dict__.keys() == their.__dict__.keys()
        assert not ours._forward_pre_hooks | ours._forward_hooks
    assert all(map(agrees, model.parameters(), stock.parameters()))
    stock.load_state_dict(model.state_dict())
    assert torch.equal(model(batch(0)), stock(batch(0)))


@pytest.mark.parametrize("shape", [(32,), (1, 32), (16, 32), (3, 5, 32), (0, 32), (2, 0, 32)])
def test_any_number_of_tokens(te, monkeypatch, shape):
    """Transformer Engine sees a multiple of 16, and never none; it makes no weights of its own."""
    made = recorded(monkeypatch, te, lambda layer, args, output: layer.weight, "__init__")
    seen = recorded(monkeypatch, te, lambda layer, args, output: args[0].shape[0])
    linear = nn.Linear(32, 48)
    stock = copy.deepcopy(linear)
    convert_to_float8(linear, TE)
    numbers = torch.random.get_rng_state()
    results = run_both(linear, stock, x=torch.ones(shape), grad=torch.ones(*shape[:-1], 48))
    assert torch.equal(torch.random.get_rng_state(), numbers)
    assert [(w.device.type, w.shape) for w in made] == [("meta", (48, 32))]
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        assert agrees(ours, theirs)
    assert seen in ([16], [32])


@pytest.mark.parametrize(
    ("x", "weight", "bias", "autocast", "y", "gemm"),
    [
        (FP32, FP32, FP32, None, FP32, FP32),
        (BF16, BF16, BF16, None, BF16, BF16),
        (FP32, BF16, FP32, None, FP32, BF16),
        (BF16, FP32, FP32, None, BF16, BF16),
        (FP32, BF16, FP32, BF16, BF16, BF16),
        (FP32, FP32, FP32, BF16, BF16, BF16),
    ],
)
def test_dtypes_are_those_of_our_own_layers(te, monkeypatch, x, weight, bias, autocast, y, gemm):
    seen = recorded(monkeypatch, te, lambda layer, args, output: output.dtype)
    linear = nn.Linear(32, 32, dtype=weight)
    linear.bias.data = linear.bias.data.to(bias)
    ours = copy.deepcopy(linear)
    convert_to_float8(linear, TE)
    convert_to_float8(ours, FP8Config(opt_level="O1"))
    x, grad = gaussian(16, 32, dtype=x), gaussian(16, 32, dtype=y)
    theirs, ours = run_both(linear, ours, x=x, grad=grad, dtype=autocast)
    assert [t.dtype for t in theirs] == [t.dtype for t in ours] == [y, x.dtype, weight, bias]
    for grad, exact in zip(theirs[2:], ours[2:], strict=True):
        assert (grad.float() - exact.float()).norm() < 0.1 * grad.float().norm()
    assert seen == [gemm]


def test_compiles_without_a_break_of_ours_and_takes_no_other_inputs(te):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    convert_to_float8(model, TE)
    x = torch.randn(5, 32)
    expected = model(x)  # starts Transformer Engine, which no graph has
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    with pytest.raises(TypeError, match=r"'0'.*float64"):
        model(x.double())
    with pytest.raises(ValueError, match=r"'0' takes inputs \(..., 32\), got \(16, 48\)"):
        model(torch.ones(16, 48))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_are_models_of_their_own(te, recipe, make):
    model = Model()
    convert_to_float8(model, FP8Config(recipe=recipe, backend="transformer-engine"))
    train(model, steps=2)
    assert b"transformer_engine.pytorch" not in pickle.dumps(model)
    copied = make(model)
    assert [layer.fp8.engine for layer in layers(copied)] == [None] * 4
    assert copied.middle.weight is copied.again.weight
    before = [p.clone() for p in model.parameters()]
    losses, _ = train(copied)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert losses == train(model)[0]


def test_an_mlp_with_a_layer_of_each_backend_hands_over_plain_tensors(te):
    model = nn.Sequential(LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=64)))
    stock = copy.deepcopy(model)
    assert convert_to_float8(model).producers == ("0",)
    convert_to_float8(model[0].up_proj, TE)
    x = torch.randn(16, 32, requires_grad=True)
    model(x).sum().backward()
    assert type(model[0].up_proj.weight.grad) is torch.Tensor
    gradient, x.grad = x.grad, None
    stock(x).sum().backward()
    assert (gradient - x.grad).norm() < 0.1 * x.grad.norm()


DELAYED = {"margin": 2, "amax_history_len": 16, "amax_compute_algo": "most_recent"}


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ({}, "Float8CurrentScaling", "HYBRID"),
        ({"recipe": "tensorwise", "grad_format": "e4m3"}, "Float8CurrentScaling", "E4M3"),
        ({"recipe": "delayed", **DELAYED}, "DelayedScaling", "HYBRID"),
        ({"recipe": "blockwise"}, "Float8BlockScaling", "E4M3"),
    ],
    ids=str,
)
def test_recipes(te, options, name, expected):
    linear = nn.Linear(32, 32)
    convert_to_float8(linear, FP8Config(backend=TE.backend, **options))
    linear(torch.ones(16, 32))
    recipe = linear.fp8.engine.recipe
    assert (type(recipe).__name__, recipe.fp8_format.name) == (name, expected)
    # A rank's scales are of what it has seen.
    own = {**DELAYED, "reduce_amax": False} if name == "DelayedScaling" else {}
    assert vars(recipe) == {"fp8_format": recipe.fp8_format, **own}


def test_sizes_that_are_no_whole_blocks_are_skipped_and_tokens_are_padded(te, monkeypatch):
    monkeypatch.setattr(te, "is_mxfp8_available", lambda return_reason: (True, ""))
    card = types.SimpleNamespace(major=10, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    seen = recorded(monkeypatch, te, lambda layer, args, output: args[0].shape)
    for recipe, multiple in (("tensorwise", 16), ("mxfp8", 32)):
        model = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 72), nn.Linear(64, 64))
        report = convert_to_float8(model, FP8Config(recipe=recipe, backend=TE.backend))
        assert report.converted == ("2",)
        why = f"is no multiple of {multiple} (Transformer Engine)"
        assert report.skipped == (("0", f"in_features=40 {why}"), ("1", f"out_features=72 {why}"))
        model[2](torch.ones(5, 64))
    assert seen == [(16, 64), (32, 64)]
    assert type(model[2].fp8.engine.recipe).__name__ == "MXFP8BlockScaling"


def test_what_cannot_run_is_refused_before_anything_is_converted(te, monkeypatch):
    linear = nn.Linear(32, 32)
    with pytest.raises(ValueError, match=r"'mxfp8'.*here: Device compute capability 10.0"):
        convert_to_float8(linear, FP8Config(recipe="mxfp8", backend=TE.backend))
    monkeypatch.setattr(transformer_engine, "_is_cuda", IS_CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match=f"CUDA devices only; this one is '{device}'"):
            convert_to_float8(linear, TE, device=device)
    monkeypatch.delattr(te, "autocast")
    with pytest.raises(ImportError, match=r"2.20 or newer, this is 2.20.2.*--upgrade"):
        convert_to_float8(linear, TE)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(ImportError, match=r"pip install .*transformer-engine\[pytorch\]"):
        convert_to_float8(linear, TE)
    assert type(linear) is nn.Linear


def test_sharded_weights_are_refused(te, single_process_group):
    mesh = init_device_mesh("cpu", (1,))
    sharded = fully_shard(nn.Sequential(nn.Linear(32, 32)), mesh=mesh)
    with pytest.raises(ValueError, match="one device and under DDP"):
        convert_to_float8(sharded, TE)
    assert not layers(sharded)
    model = nn.Sequential(nn.Linear(32, 32))
    convert_to_float8(model, TE)
    with pytest.raises(ValueError, match="one device and under DDP"):
        parallelize_module(model, mesh, {"0": Float8ColwiseParallel()})
    linear = copy.deepcopy(model[0])
    with pytest.raises(ValueError, match="one device and under DDP"):
        connect_fsdp(fully_shard(model, mesh=mesh), TE)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Replicate()]))
    with pytest.raises(ValueError, match=r"got a DTensor.*one device and under DDP"):
        linear(torch.ones(16, 32))


LEVELS = ("O2", {}), ("O3", {}), ("O3", {"gradient_release": True}), ("O2", {"recipe": "delayed"})


@pytest.mark.parametrize(("level", "options"), LEVELS, ids=str)
def test_levels_run_as_with_our_own_layers(te, level, options):
    """Weights in BF16, float32 biases, 8-bit gradients; the loss is that of our own layers."""
    losses = {}
    for backend in ("torch", "transformer-engine"):
        torch.manual_seed(0)
        model, config = Model(), FP8Config(backend=backend, opt_level=level, **options)
        optimizer, _ = adamw(model, config, lr=1e-2)
        assert type(model.up.weight) is SplitWeight
        losses[backend] = train_steps(model, optimizer, 12, loss_of=partial(token_loss, bf16=True))
        token_loss(model, 0, bf16=True).backward()
        if level == "O3":
            kind = ReleasedGrad if "gradient_release" in options else Float8Grad
            assert type(model.up.weight.grad) is kind
        merged = torch_fp8.merged_state_dict(model, optimizer)
        assert list(merged) == list(model.state_dict())
        assert {value.dtype for value in merged.values()} == {FP32}
        torch_fp8.restore_weights(optimizer)
        revert(model)
        assert {p.dtype for p in model.parameters()} == {FP32}
    assert losses["transformer-engine"][-1] < 0.9 * losses["transformer-engine"][0]
    assert losses["transformer-engine"] == pytest.approx(losses["torch"], rel=0.05)


@pytest.fixture(params=["tensorwise", "delayed", "blockwise", "mxfp8"])
def on_card(request):
    """The configuration of each recipe that Transformer Engine runs on this card."""
    pytest.importorskip("transformer_engine.pytorch")
    try:
        transformer_engine.check_transformer_engine(CUDA, request.param)
    except ValueError as error:
        pytest.skip(str(error))
    return FP8Config(backend="transformer-engine", recipe=request.param)


@pytest.mark.gpu
def test_trains_on_a_card_as_bf16_does(on_card):
    """The band is that of the stub's levels: 5 %."""
    torch.manual_seed(0)
    model = Model(256).to(CUDA)
    stock = copy.deepcopy(model)
    optimizer, _ = adamw(model, on_card)
    plain, loss_of = torch.optim.AdamW(stock.parameters()), partial(token_loss, bf16=True)
    losses = train_steps(model, optimizer, 20, loss_of=loss_of)
    assert losses == pytest.approx(train_steps(stock, plain, 20, loss_of=loss_of), rel=0.05)
    assert len(layers(model)) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [0, 1, 77, 256])
def test_gradients_on_a_card_agree_with_float32(on_card, num_tokens):
    """24 dB is the floor of a product of E5M2 with E4M3."""
    linear = nn.Linear(256, 512, device=CUDA)
    exact = copy.deepcopy(linear)
    convert_to_float8(linear, on_card)
    x, grad = torch.randn(num_tokens, 256, device=CUDA), torch.randn(num_tokens, 512, device=CUDA)
    for _ in range(3):  # delayed scaling has to see amaxes first
        linear.zero_grad()
        exact.zero_grad()
        results = run_both(linear, exact, x=x, grad=grad)
    for ours, theirs, floor in zip(*results, (28, 24, 24), strict=False):  # of a bias none
        assert ours.shape == theirs.shape
        assert not num_tokens or sqnr_db(theirs, ours) >= floor - 1


@pytest.mark.gpu
def test_scaling_state_is_taken_over_and_a_frozen_weight_gets_no_gradient(on_card):
    model = Model(256).to(CUDA)
    model.up.weight.requires_grad_(False)
    convert_to_float8(model, on_card)
    for step in range(3):
        model(batch(step).to(CUDA)).sum().backward()
    assert model.up.weight.grad is None
    assert model.down.weight.grad is not None
    state = torch_fp8.scaling_state_dict(model)
    copied = copy.deepcopy(model)
    copied(batch(3).to(CUDA))
    assert torch_fp8.scaling_state_dict(copied).keys() == state.keys()
    if on_card.recipe == "delayed":
        assert (state["up.amax_history"][:, :3] > 0).all()
        assert (state["up.amax_history"][:, 3:] == 0).all()
        moved = torch_fp8.scaling_state_dict(copied)["up.amax_history"]
        assert torch.equal(moved[1, 1:4], state["up.amax_history"][1, :3])


@pytest.mark.gpu
def test_compiles_on_a_card(on_card):
    if on_card.recipe == "delayed":
        pytest.skip("Transformer Engine compiles no delayed scaling")
    model, tokens = Model(256).to(CUDA, BF16), batch(0, 128).to(CUDA)
    convert_to_float8(model, on_card)
    expected = model(tokens)
    assert sqnr_db(expected.float(), torch.compile(model)(tokens).float()) >= 40
