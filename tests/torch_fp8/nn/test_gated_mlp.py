"""Gated MLPs in FP8: what is written once, kept and emitted; gate and up in one layer or two.

What a whole block does with them is tested in test_fused_layers.py.
"""

import copy
import itertools
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.internals import Float8GatedMLP, LazyQuantizedTensor, sqnr_db
from tests.steps import Calls, assert_equal, gaussian, renew_scales, saved_bytes, train
from tests.torch_fp8.block_models import MLP, JoinedMLP, UpFirstMLP
from torch_fp8 import FP8Config, convert_to_float8, revert

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
INNER = 256


def _model(cls=JoinedMLP, size=64, inner=INNER, bias=False, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    norm = nn.RMSNorm(size, eps=1e-5)
    model = nn.Sequential(norm, cls(size, inner, bias)).to(dtype)
    report = convert_to_float8(model, FP8Config(**options))
    assert report.producers == ("0", "1")
    return model


# Values.


@pytest.mark.parametrize(
    ("cls", "inner"), [*itertools.product([JoinedMLP, UpFirstMLP], [256, 176, 84]), (MLP, 176)]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_and_unfused_have_the_same_bytes(recipe, cls, inner):
    """What is cast is what the plain product and the plain gradient would have been.

    Blocks do not divide 176, nor what moves 16 elements at a time 84: cast in another launch.
    """
    fused, unfused = (_model(cls, inner=inner, recipe=recipe) for _ in range(2))
    mlp, plain = unfused[1], []

    def to_plain(grad):
        assert isinstance(grad, LazyQuantizedTensor)
        plain.append(grad + 0)
        return plain[-1]

    for name, layer in mlp.named_children():
        if name in ("gate_up_proj", "gate_proj", "up_proj"):
            layer.register_forward_hook(lambda m, args, y: y.register_hook(to_plain) and None)
    mlp.down_proj.register_forward_pre_hook(lambda m, args: (args[0] + 0,))
    for step in range(2):  # delayed: the second with a history
        x = gaussian(2, 33, 64, seed=step)
        assert_equal(train(unfused, x), train(fused, x))
    shapes = [(2, 33, inner)] * 4 if cls is MLP else [(2, 33, 2 * inner)] * 2
    assert [g.shape for g in plain] == shapes
    assert type(plain[0]) is torch.Tensor


@pytest.mark.parametrize("cls", [JoinedMLP, UpFirstMLP])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_signal_stays_that_of_the_plain_model(recipe, dtype, cls):
    """A GEMM has 28 dB: a product of two results 25, and behind another GEMM 23.2.

    What is saved in E4M3 has 31 dB, an FP8 gradient 24.6 dB per GEMM that it went through.
    """
    fused = _model(cls, bias=True, dtype=dtype, recipe=recipe)
    plain = copy.deepcopy(fused)
    revert(plain)
    assert type(plain[1]) is cls
    want, got = (
        train(plain, gaussian(2, 64, 64, dtype=dtype)),
        train(fused, gaussian(2, 64, 64, dtype=dtype)),
    )
    assert sqnr_db(want[0], got[0]) > 23
    assert sqnr_db(want[1], got[1]) > 18
    assert all(sqnr_db(want[2][n], got[2][n]) > 13 for n in want[2])


# What is written, and kept.


@pytest.mark.parametrize("recipe", RECIPES)
def test_product_and_gradient_are_cast_as_they_are_made(recipe):
    model = _model(recipe=recipe)
    model(gaussian(128, 64).requires_grad_()).sum().backward()
    renew_scales()
    with Calls() as calls:
        model(gaussian(128, 64).requires_grad_()).sum().backward()
    count = calls.names.count
    assert count("swiglu_quantize") == 1
    assert count("gate_up_backward_quantize") == 1
    assert count("gate_up_backward_amax") == (recipe == "tensorwise")
    weights, grad_of_down = 2 * 2, 1
    assert count("quantize_2d") == weights + grad_of_down
    dense = ("swiglu", "swiglu_backward", "gate_up_backward", "swiglu_backward_quantize")
    assert not any(name in calls.names for name in dense)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_two_layers_share_their_input_and_the_maximum_of_their_gradients(recipe):
    mlp = nn.Sequential(MLP(64, INNER)).bfloat16()
    convert_to_float8(mlp, FP8Config(recipe=recipe))
    mlp(gaussian(128, 64).requires_grad_()).sum().backward()
    renew_scales()
    with Calls() as calls:
        mlp(gaussian(128, 64).requires_grad_()).sum().backward()
    count = calls.names.count
    grouped = recipe == "tensorwise"
    weights, x_and_grad_of_down = (3 + 1 if grouped else 2 * 3), 2
    assert count("quantize_2d") == weights + x_and_grad_of_down
    assert count("cast_side_by_side") == grouped
    assert count("gate_up_backward_quantize") == count("gate_up_backward_amax") == grouped
    assert count("swiglu_backward_quantize") == (not grouped)
    assert "swiglu_backward_amax" not in calls.names


@pytest.mark.parametrize(
    ("recipe", "operator"),
    [("blockwise", "swiglu_backward_quantize"), ("rowwise", "swiglu_backward")],
)
def test_the_first_gradient_is_gone_when_the_second_is_taken(recipe, operator):
    model, made, alive = _model(MLP, recipe=recipe), [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            if func._schema.name == f"torch_fp8::{operator}":
                parts = len(results) // 2
                made.append([weakref.ref(results[i * parts]) for i in range(2)])
            return results

    for layer in (model[1].gate_proj, model[1].up_proj):  # told when the layer's backward is over
        layer.weight.register_post_accumulate_grad_hook(
            lambda p: alive.append(sum(ref() is not None for ref in made[0]))
        )
    with Watch():
        model(gaussian(32, 64).requires_grad_()).sum().backward()
    assert alive == [1, 0]


@pytest.mark.parametrize("options", [{}, {"recipe": "blockwise"}, {"save_activations": "bf16"}])
def test_bytes_kept_are_those_of_two_layers(options):
    x = gaussian(256, 64)
    two, one = (saved_bytes(_model(c, **options), x.requires_grad_()) for c in (MLP, JoinedMLP))
    scale = 4 if options.get("recipe") is None else 0  # a group's are none of autograd's tensors
    assert one == two + scale


def test_frozen_layers_keep_and_cast_no_more_than_their_gradients_need():
    model = _model()
    mlp, seen = model[1], []
    mlp.gate_up_proj.weight.requires_grad_(False)

    def note(module, grads):
        seen.append(grads[0].production)

    mlp.gate_up_proj.register_full_backward_pre_hook(note)
    y = model(gaussian(32, 64).requires_grad_())
    y.sum().backward()
    ((row, col),) = seen[0].payloads.values()
    assert row is not None  # of dgrad
    assert col is None
    assert mlp.gate_up_proj.weight.grad is None
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model.requires_grad_(False)(gaussian(32, 64))
    assert kept == []


def test_a_frozen_input_leaves_the_weight_gradient_alone():
    mlp, seen = _model()[1], []
    mlp.gate_up_proj.register_full_backward_pre_hook(lambda m, g: seen.append(g[0].production))
    mlp(gaussian(32, 64)).sum().backward()
    ((row, col),) = seen[0].payloads.values()
    assert row is None
    assert col.qdata.shape == (2 * INNER, 32)


def test_a_frozen_layer_behind_gets_no_transposed_blocks():
    for frozen, options in ((False, {}), (True, {}), (False, {"wgrad": "bf16"})):
        mlp, seen = _model(recipe="blockwise", **options)[1], []
        mlp.down_proj.weight.requires_grad_(not frozen)
        mlp.down_proj.register_forward_pre_hook(
            lambda m, args, seen=seen: seen.extend(args[0].production.payloads.values())
        )
        mlp(gaussian(32, 64))
        ((row, col),) = seen
        assert row is not None
        assert (col is None) == (frozen or bool(options))


def test_a_layer_behind_that_does_not_run_in_fp8_gets_no_blocks():
    mlp = _model(recipe="blockwise", eval_fp8=False)[1]
    mlp.down_proj.eval()
    with Calls() as calls:
        mlp(gaussian(32, 64).requires_grad_())
    assert "swiglu_quantize" not in calls.names
    assert "swiglu" in calls.names


# Around them.


def test_gate_and_up_of_different_dtypes_are_multiplied_as_the_module_does():
    mlp, seen = _model(MLP, dtype=torch.float32)[1], {}
    mlp.gate_proj.register_forward_hook(lambda m, args, y: seen.setdefault("gate", y.float()))
    mlp.up_proj.register_forward_hook(lambda m, args, y: seen.setdefault("up", y))
    mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.setdefault("product", args[0]))
    with torch.autocast("cpu", torch.bfloat16):
        mlp(gaussian(4, 64, dtype=torch.float32))
    assert (seen["gate"].dtype, seen["up"].dtype) == (torch.float32, torch.bfloat16)
    assert type(seen["product"]) is torch.Tensor
    assert torch.equal(seen["product"], F.silu(seen["gate"]) * seen["up"])


def test_hooks_of_the_layers_go_on():
    model = _model()
    mlp, seen = model[1], []
    mlp.gate_up_proj.register_forward_pre_hook(lambda m, args: seen.append("before"))
    mlp.gate_up_proj.register_forward_hook(lambda m, args, y: y * 2)
    mlp.gate_up_proj.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    mlp.down_proj.register_forward_hook(lambda m, args, y: seen.append("down"))
    other = _model()
    with torch.no_grad():
        other[1].gate_up_proj.weight.mul_(2)
    want, got = train(other, gaussian(32, 64)), train(model, gaussian(32, 64))
    assert seen == ["before", "down", "backward"]
    assert torch.equal(want[0], got[0])  # powers of two pass through every rounding
    assert torch.equal(want[1], got[1])


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_the_activation_are_called(register):
    model, seen = _model(), []
    reference = copy.deepcopy(model)
    getattr(model[1].act_fn, register)(lambda *args: seen.append(args[0]))
    want, got = train(reference, gaussian(32, 64)), train(model, gaussian(32, 64))
    assert seen == [model[1].act_fn]
    assert all(sqnr_db(want[2][name], got[2][name]) > 20 for name in want[2])


@pytest.mark.parametrize("cls", [MLP, JoinedMLP])
def test_an_activation_that_is_replaced_after_conversion_is_the_one_that_counts(cls):
    model, x = _model(cls, recipe="delayed"), gaussian(32, 64)
    model[1].act_fn = nn.GELU()
    stock = copy.deepcopy(model)
    revert(stock)
    assert sqnr_db(stock(x), model(x)) > 20
    compiled = copy.deepcopy(model)
    compiled.compile(backend="eager", fullgraph=True)
    assert_equal(train(model, x), train(compiled, x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_activation_checkpointing_changes_nothing(recipe, smooth, reentrant):
    plain, recomputed = (_model(recipe=recipe, smooth_swiglu=smooth) for _ in range(2))

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self._modules = recomputed._modules

        def forward(self, x):
            return checkpoint(recomputed, x, use_reentrant=reentrant)

    for _ in range(2):
        assert_equal(train(plain, gaussian(2, 32, 64)), train(Checkpointed(), gaussian(2, 32, 64)))
        plain.zero_grad()
        recomputed.zero_grad()


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (UpFirstMLP, {"recipe": "tensorwise"}),
        (UpFirstMLP, {"recipe": "blockwise"}),
        (JoinedMLP, {"recipe": "tensorwise", "smooth_swiglu": True}),
        (JoinedMLP, {"recipe": "delayed", "smooth_swiglu": True}),
    ],
    ids=str,
)
def test_it_compiles_without_graph_breaks(cls, options):
    eager = _model(cls, **options)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        want, got = train(eager, gaussian(2, 32, 64)), train(compiled, gaussian(2, 32, 64))
        assert sqnr_db(want[0], got[0]) > 40
        assert sqnr_db(want[1], got[1]) > 35
        for name, grad in want[2].items():
            assert sqnr_db(grad, dict(twin.named_parameters())[name].grad) > 30, name


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (3, 0, 64), (5, 1, 64), (129, 64)], ids=str)
def test_any_number_of_tokens(shape, recipe, smooth):
    y, grad_x, grads = train(_model(recipe=recipe, smooth_swiglu=smooth), gaussian(*shape))
    assert y.shape == grad_x.shape == shape
    assert all(g.isfinite().all() for g in grads.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_stays_visible(bad, recipe, smooth):
    model = _model(recipe=recipe, smooth_swiglu=smooth)
    x = gaussian(8, 64)
    x[3, 5] = bad
    y, _, grads = train(model, x)
    assert not y[3].isfinite().all()
    assert not grads["1.gate_up_proj.weight"].isfinite().all()
    assert not grads["1.down_proj.weight"].isfinite().all()


def test_conversion_keeps_class_and_name_and_reverts():
    model = _model()
    mlp = model[1]
    assert isinstance(mlp, JoinedMLP)
    assert isinstance(mlp, Float8GatedMLP)
    assert type(mlp).__name__ == "JoinedMLP"
    assert mlp.fp8.spec == (("gate_up_proj",), "down_proj", True)
    want = train(model, gaussian(4, 64))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.zero_grad()
        assert_equal(want, train(twin, gaussian(4, 64)))
        assert type(twin[1]) is type(mlp)
    assert convert_to_float8(model).producers == ("0", "1")
    model.append(nn.Linear(64, 64).bfloat16())
    assert convert_to_float8(model, FP8Config(skip=("1",))).producers == ("0",)
    assert type(mlp) is JoinedMLP
    convert_to_float8(model)
    assert type(mlp) is not JoinedMLP
    config = FP8Config(save_activations="bf16")
    convert_to_float8(model, config)
    assert mlp.fp8.config is config
    revert(model)
    assert type(mlp) is JoinedMLP
    assert not any(k.startswith("fp8") for k in vars(mlp))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_and_inputs_without_dimensions_reach_the_layers():
    model = _model(MLP, dtype=torch.float32)[1]
    rows = [torch.randn(5, 64), torch.randn(11, 64)]
    outputs = model(torch.nested.nested_tensor(rows)).unbind()
    for x, y in zip(rows, outputs, strict=True):
        assert (y - model(x)).norm() < 0.15 * y.norm()
    with pytest.raises(ValueError, match=r"takes inputs \(..., 64\), got \(\)"):
        model(torch.tensor(1.0))
