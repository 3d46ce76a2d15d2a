"""The backend on a stub of Transformer Engine."""

import copy
import pickle
import sys
import types

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

import torch_fp8
from tests.steps import train_steps
from torch_fp8 import FP8Config, convert_to_float8, revert
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.tensor_parallel.styles import Float8ColwiseParallel
from torch_fp8.nn import transformer_engine
from torch_fp8.nn.transformer_engine import TransformerEngineLinear
from torch_fp8.tensor.float8_grad import Float8Grad
from torch_fp8.tensor.released_grad import ReleasedGrad
from torch_fp8.tensor.split_weight import SplitWeight

TE = FP8Config(backend="transformer-engine", opt_level="O1")
FP32, BF16 = torch.float32, torch.bfloat16
IS_CUDA = transformer_engine._is_cuda
RECIPES = ("tensorwise", "delayed", "blockwise")


class Model(nn.Module):
    """An embedding tied to lm_head, two layers with the same weight, one without a bias."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.up = nn.Linear(32, 64)
        self.middle = nn.Linear(64, 64, bias=False)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.middle.weight
        self.down = nn.Linear(64, 32)
        self.lm_head = nn.Linear(32, 48, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.up(self.embed(tokens)).relu()
        x = x + self.again(self.middle(x).relu())
        return self.lm_head(self.down(x))


def layers(model):
    return [m for m in model.modules() if isinstance(m, TransformerEngineLinear)]


def batch(step, tokens=7):
    return torch.randint(48, (3, tokens), generator=torch.Generator().manual_seed(step))


def agrees(ours, theirs):
    return (ours.float() - theirs.float()).norm() <= 1e-5 * theirs.float().norm()


def recorded(monkeypatch, te, what):
    """What ``what(input, output)`` returns of each forward of ``te.Linear``."""
    seen, forward = [], te.Linear.forward

    def recording(self, inp):
        output = forward(self, inp)
        seen.append(what(inp, output))
        return output

    monkeypatch.setattr(te.Linear, "forward", recording)
    return seen


def train(model, steps=4, optimizer=None):
    """Losses of a few steps, with another number of tokens in each."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    return train_steps(
        model, optimizer, steps, loss_of=lambda m, i: m(batch(i, 5 + i)).logsumexp(-1).mean()
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_as_a_stock_model(te, recipe):
    model = Model()
    stock = copy.deepcopy(model)
    report = convert_to_float8(model, FP8Config(recipe=recipe, backend="transformer-engine"))
    assert report.converted == ("up", "middle", "again", "down")
    assert report.skipped == (("lm_head", "skip='lm_head'"),)
    assert train(model, steps=2) == pytest.approx(train(stock, steps=2), rel=1e-5)
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        assert agrees(ours, theirs)


@pytest.mark.parametrize("shape", [(32,), (1, 32), (16, 32), (3, 5, 32), (0, 32), (2, 0, 32)])
def test_any_number_of_tokens(te, monkeypatch, shape):
    """Transformer Engine sees a multiple of 16, and never none."""
    seen = recorded(monkeypatch, te, lambda inp, output: inp.shape[0])
    linear = nn.Linear(32, 48)
    stock = copy.deepcopy(linear)
    convert_to_float8(linear, TE)
    for net in (linear, stock):
        net.x = torch.ones(shape, requires_grad=True)
        net.y = net(net.x)
        net.y.sum().backward()
    assert linear.y.shape == stock.y.shape
    assert agrees(linear.y, stock.y)
    assert agrees(linear.x.grad, stock.x.grad)
    assert agrees(linear.weight.grad, stock.weight.grad)
    assert agrees(linear.bias.grad, stock.bias.grad)
    assert seen in ([16], [32])


@pytest.mark.parametrize(
    ("x", "weight", "bias", "autocast", "expected", "multiplied"),
    [
        (FP32, FP32, FP32, None, FP32, FP32),
        (BF16, BF16, BF16, None, BF16, BF16),
        (FP32, BF16, FP32, None, FP32, BF16),
        (BF16, FP32, FP32, None, BF16, BF16),
        (FP32, BF16, FP32, BF16, BF16, BF16),
        (FP32, FP32, FP32, BF16, BF16, BF16),
    ],
)
def test_dtypes_are_those_of_our_own_layers(
    te, monkeypatch, x, weight, bias, autocast, expected, multiplied
):
    seen = recorded(monkeypatch, te, lambda inp, output: output.dtype)
    linear = nn.Linear(32, 32, dtype=weight)
    linear.bias.data = linear.bias.data.to(bias)
    ours = copy.deepcopy(linear)
    convert_to_float8(linear, TE)
    convert_to_float8(ours, FP8Config(opt_level="O1"))
    for net in (linear, ours):
        net.x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(x)
        net.x.requires_grad_()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            net.y = net(net.x)
        net.y.float().pow(2).sum().backward()
        assert net.y.dtype == expected
    assert linear.x.grad.dtype == ours.x.grad.dtype == x
    for name in ("weight", "bias"):
        grad = getattr(linear, name).grad
        assert grad.dtype == getattr(ours, name).grad.dtype
        error = grad.float() - getattr(ours, name).grad.float()
        assert error.norm() < 0.1 * grad.float().norm()
    assert seen == [multiplied]


def test_compiles_without_a_break_of_ours_and_takes_no_other_inputs(te):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    convert_to_float8(model, TE)
    x = torch.randn(5, 32)
    expected = model(x)  # starts Transformer Engine, which no graph has
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    with pytest.raises(TypeError, match=r"'0'.*float64"):
        model(x.double())
    with pytest.raises(ValueError, match=r"'0' takes inputs \(..., 32\), got \(16, 48\)"):
        model(torch.ones(16, 48))


def test_keeps_parameters_tying_and_requires_grad(te):
    model = Model()
    model.up.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = dict(model.named_parameters())
    frozen = model.up.weight.clone()
    convert_to_float8(model, TE)
    train(model, optimizer=optimizer)
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in after)
    assert model.middle.weight is model.again.weight
    assert model.lm_head.weight is model.embed.weight
    assert not model.up.weight.requires_grad
    assert torch.equal(model.up.weight, frozen)
    assert set(optimizer.state) == {p for p in after.values() if p.requires_grad}
    for layer in layers(model):  # what Transformer Engine multiplies and asks for requires_grad
        assert layer.fp8.engine.linear.weight is layer.weight
        assert layer.bias is None or layer.fp8.engine.linear.bias is layer.bias


def test_transformer_engine_makes_no_weights(te, monkeypatch):
    made, init = [], te.Linear.__init__

    def recording(self, *args, **options):
        init(self, *args, **options)
        made.append(self.weight)

    monkeypatch.setattr(te.Linear, "__init__", recording)
    linear = nn.Linear(32, 48, dtype=BF16)
    convert_to_float8(linear, TE)
    numbers = torch.random.get_rng_state()
    linear(torch.ones(16, 32, dtype=BF16))
    assert [(w.device.type, w.dtype, w.shape) for w in made] == [("meta", BF16, (48, 32))]
    assert torch.equal(torch.random.get_rng_state(), numbers)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_are_models_of_their_own(te, recipe, make):
    model = Model()
    convert_to_float8(model, FP8Config(recipe=recipe, backend="transformer-engine"))
    train(model, steps=2)
    assert b"transformer_engine.pytorch" not in pickle.dumps(model)
    copied = make(model)
    assert [layer.fp8.engine for layer in layers(copied)] == [None] * 4
    assert [type(layer) for layer in layers(copied)] == [TransformerEngineLinear] * 4
    assert copied.middle.weight is copied.again.weight
    before = [p.clone() for p in model.parameters()]
    losses = train(copied)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert losses == train(model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_revert_leaves_stock_modules(te, recipe):
    model = Model()
    stock = copy.deepcopy(model)
    convert_to_float8(model, FP8Config(recipe=recipe, backend="transformer-engine"))
    model(batch(0))
    assert revert(model) == 4
    assert revert(model) == 0
    for ours, theirs in zip(model.modules(), stock.modules(), strict=True):
        assert type(ours) is type(theirs)
        assert ours.__dict__.keys() == theirs.__dict__.keys()
        assert not ours._forward_pre_hooks
        assert not ours._forward_hooks
    assert torch.equal(model(batch(0)), stock(batch(0)))


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
    seen = recorded(monkeypatch, te, lambda inp, output: inp.shape)
    for recipe, multiple in (("tensorwise", 16), ("mxfp8", 32)):
        model = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 72), nn.Linear(64, 64))
        report = convert_to_float8(model, FP8Config(recipe=recipe, backend=TE.backend))
        assert report.converted == ("2",)
        reason = f"is no multiple of {multiple} (Transformer Engine)"
        assert report.skipped == (
            ("0", f"in_features=40 {reason}"),
            ("1", f"out_features=72 {reason}"),
        )
        model[2](torch.ones(5, 64))
    assert seen == [(16, 64), (32, 64)]
    assert type(model[2].fp8.engine.recipe).__name__ == "MXFP8BlockScaling"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"recipe": "rowwise"}, "excludes recipe='rowwise': it has tensorwise, delayed"),
        ({"wgrad": "bf16"}, "excludes wgrad; use backend='torch'"),
        ({"fast_accum": ()}, "fast_accum"),
        ({"cache_weights": True}, "cache_weights"),
        ({"emulate": True}, "emulate"),
        ({"recipe": "delayed", "amax_history_len": 1}, "amax_history_len=1"),
        ({"wgrad": "bf16", "emulate": True}, "excludes wgrad, emulate;"),
    ],
    ids=str,
)
def test_options_that_transformer_engine_has_not(options, named):
    with pytest.raises(ValueError, match=named):
        FP8Config(backend="transformer-engine", **options)


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


def test_auto_is_what_transformer_engine_has(te, monkeypatch):
    monkeypatch.setattr("torch_fp8.conversion.convert.resolve_auto", lambda device: "rowwise")
    report = convert_to_float8(nn.Linear(32, 32), TE)
    assert report.recipe.name == "tensorwise"


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
    with pytest.raises(ValueError, match="one device and under DDP"):
        connect_fsdp(fully_shard(model, mesh=mesh), TE)
    linear = nn.Linear(32, 32)
    convert_to_float8(linear, TE)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Replicate()]))
    with pytest.raises(ValueError, match=r"got a DTensor.*one device and under DDP"):
        linear(torch.ones(16, 32))


class Wide(nn.Module):
    """Weights of 4,096 elements and more, which the optimizer keeps in 8 bits."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.down(self.up(x).relu())


def vector_loss(model, step):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.bfloat16):
        return (model(x) - x).float().pow(2).mean()


@pytest.mark.parametrize(
    "options",
    [
        {"opt_level": "O2"},
        {"opt_level": "O3"},
        {"opt_level": "O3", "gradient_release": True},
        {"opt_level": "O2", "recipe": "delayed"},
    ],
    ids=str,
)
def test_levels_run_as_with_our_own_layers(te, options):
    """Weights in BF16, float32 biases, 8-bit gradients; the loss is that of our own layers."""
    losses = {}
    for backend in ("torch", "transformer-engine"):
        torch.manual_seed(0)
        model = Wide()
        config = FP8Config(backend=backend, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        convert_to_float8(model, config)
        torch_fp8.convert_optimizer(optimizer, config, model=model)
        assert type(model.up.weight) is SplitWeight
        losses[backend] = train_steps(model, optimizer, 12, loss_of=vector_loss)
        vector_loss(model, 0).backward()
        if options["opt_level"] == "O3":
            kind = ReleasedGrad if "gradient_release" in options else Float8Grad
            assert type(model.up.weight.grad) is kind
        merged = torch_fp8.merged_state_dict(model, optimizer)
        assert list(merged) == ["up.weight", "up.bias", "down.weight", "down.bias"]
        assert all(value.dtype == torch.float32 for value in merged.values())
        torch_fp8.restore_weights(optimizer)
        revert(model)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert losses["transformer-engine"][-1] < 0.8 * losses["transformer-engine"][0]
    assert losses["transformer-engine"] == pytest.approx(losses["torch"], rel=0.05)
