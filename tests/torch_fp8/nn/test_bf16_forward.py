"""The forward in BF16 with FP8's backward: `torch_fp8.set_forward_precision`."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_fp8
from tests.compiled_graphs import count_graphs
from tests.internals import Fallback, Float8Experts, LastSteps, stored
from tests.models import llama
from tests.moe_models import moe_model
from tests.saved_activations import count_saved
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, set_forward_precision

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
K, N = 96, 64


def _x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _layer(config, dtype=torch.float32):
    torch.manual_seed(0)
    layer = nn.Linear(K, N, dtype=dtype)
    convert_to_float8(layer, config)
    return layer


def _run(layer, x, autocast=True):
    """Return the output, the gradients, and the bytes saved for backward."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), count_saved() as saved:
        y = layer(x)
    y.backward(torch.sin(torch.arange(y.numel(), dtype=torch.float32)).view(y.shape).to(y.dtype))
    return y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone(), saved.total


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_forward_is_stock_bf16_and_backward_that_of_fp8(recipe, wgrad):
    layer, x = _layer(FP8Config(recipe=recipe, wgrad=wgrad)), _x(2, 24, K)
    in_fp8 = _run(layer, x)
    assert set_forward_precision(layer, "bf16") == 1
    y, *gradients, nbytes = _run(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        stock = F.linear(x, layer.weight, layer.bias)
    assert torch.equal(y, stock)
    assert not torch.equal(y, in_fp8[0])
    for ours, theirs in zip(gradients, in_fp8[1:-1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    # The scale that forward would have passed to dgrad is all that may be missing.
    assert in_fp8[-1] - 8 <= nbytes <= in_fp8[-1]
    assert set_forward_precision(layer, "fp8") == 1
    assert torch.equal(_run(layer, x)[0], in_fp8[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_autocast_it_multiplies_as_the_stock_layer(dtype):
    layer, x = _layer("tensorwise", dtype), _x(16, K).to(dtype)
    set_forward_precision(layer, "bf16")
    assert torch.equal(_run(layer, x, autocast=False)[0], F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("cache_weights", [False, True])
def test_weight_in_two_halves_is_its_upper_half(cache_weights):
    config = FP8Config(recipe="tensorwise", cache_weights=cache_weights)
    torch.manual_seed(0)
    layer = nn.Linear(128, N)
    convert_to_float8(layer, config)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    convert_optimizer(optimizer, config, model=layer)
    x = _x(16, 128)
    for precision in ("fp8", "bf16", "bf16", "fp8"):
        set_forward_precision(layer, precision)
        y, *_ = _run(layer, x)
        with torch.autocast("cpu", torch.bfloat16):
            stock = F.linear(x, stored(layer.weight), layer.bias)
        assert torch.equal(y, stock) == (precision == "bf16")
        optimizer.step()


def _with_norms(smooth):
    torch.manual_seed(0)
    model = llama(num_hidden_layers=1)
    convert_to_float8(model, FP8Config(recipe="blockwise", smooth_swiglu=smooth))
    return model.train()


def _loss(model, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@pytest.mark.parametrize("smooth", [False, True])
def test_norms_and_mlps_hand_over_plain_results(smooth):
    model, tokens = _with_norms(smooth), torch.arange(32).view(2, 16)
    in_fp8 = _loss(model, tokens)
    set_forward_precision(model, "bf16")
    ours = _loss(model, tokens)
    with torch_fp8.high_precision():
        stock = _loss(model, tokens)
    assert abs(ours - stock) < 0.2 * abs(in_fp8 - stock)
    ours.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_recomputation_has_the_precision_of_its_forward():
    model, tokens = _with_norms(False), torch.arange(32).view(2, 16)
    set_forward_precision(model, "bf16")
    outputs: list[torch.Tensor] = []
    projection = model.model.layers[0].self_attn.o_proj
    projection.register_forward_hook(lambda _, args, output: outputs.append(output.detach()))
    grads = []
    for reentrant in (None, False):
        model.zero_grad()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        _loss(model, tokens).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    without, first, again = outputs
    assert torch.equal(first, without)
    assert torch.equal(again, first)
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", ["block", "layers"])
def test_experts(form):
    torch.manual_seed(0)
    model = moe_model("Qwen3Moe")
    if form == "layers":  # no gate that kernels know
        for module in model.modules():
            if hasattr(module, "act_fn"):
                module.act_fn = nn.Softplus()
    convert_to_float8(model, FP8Config(recipe="tensorwise"))
    tokens = torch.arange(48).view(2, 24)
    experts = [m for m in model.modules() if isinstance(m, Float8Experts)]
    assert len(experts) == 2
    assert (experts[0].fp8_gate is not None) == (form == "block")
    x, index = _x(24, 64), torch.arange(48).view(24, 2) % 4

    def outputs():
        with torch.autocast("cpu", torch.bfloat16):
            return [m(x, index, torch.full((24, 2), 0.5)).detach().float() for m in experts]

    in_fp8 = outputs()
    assert set_forward_precision(model, "bf16") > 2
    ours = outputs()
    with torch_fp8.high_precision():
        stock = outputs()
    for y, fp8, bf16 in zip(ours, in_fp8, stock, strict=True):
        assert (y - bf16).norm() < 0.2 * (fp8 - bf16).norm()
    _loss(model, tokens).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_evaluation_and_rollout_follow():
    layer, x = _layer("tensorwise").eval(), _x(1, K)
    with torch.no_grad():
        in_fp8 = [layer(x) for _ in range(3)][-1]
        set_forward_precision(layer, "bf16")
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        with torch_fp8.rollout(layer):
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        set_forward_precision(layer, "fp8")
        assert torch.equal(layer(x), in_fp8)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_compiled_model_gets_one_more_graph(recipe):
    layer, x = _layer(recipe), _x(16, K)
    outputs = []

    def program(precisions):
        compiled = torch.compile(layer, backend="aot_eager")
        for precision in precisions:
            set_forward_precision(layer, precision)
            compiled(x).sum().backward()
            outputs.append(compiled(x).detach())

    one = count_graphs(lambda: program(["fp8", "fp8"]))
    both = count_graphs(lambda: program(["fp8", "bf16", "bf16", "fp8"]))
    assert both.graphs == one.graphs + 1
    assert both.recompilations == 1
    assert both.breaks == 0
    assert torch.equal(outputs[-2], F.linear(x, layer.weight, layer.bias))
    assert torch.equal(outputs[-1], outputs[0])


def test_delayed_scaling_goes_on_with_its_history():
    layer, x = _layer(FP8Config(recipe="delayed")), _x(16, K)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for precision in ("fp8", "fp8", "bf16", "bf16", "bf16"):
        set_forward_precision(layer, precision)
        _run(layer, x)
        optimizer.step()
    history, _ = layer.scaling_state
    assert (history[2, :5] > 0).all()  # gradients' amaxes
    set_forward_precision(layer, "fp8")
    y = _run(layer, x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert (y - F.linear(x, layer.weight, layer.bias)).abs().max() < 0.2


def test_weights_stored_in_fp8_only_stay_there():
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, N))
    model[0].requires_grad_(False)
    convert_to_float8(model, FP8Config(recipe="tensorwise", frozen_weights="fp8"))
    x = _x(16, K)
    frozen = model[0](x)
    assert set_forward_precision(model, "bf16") == 1
    assert torch.equal(model[0](x), frozen)
    assert "in 1 of 2 layers; weights stored in FP8 only stay" in str(LastSteps(model, 0.1, 20))
    with pytest.raises(ValueError, match="stored in FP8 only"):
        set_forward_precision(model[0], "bf16")
    with pytest.raises(ValueError, match="stored in FP8 only"):  # at the start, not in the end
        LastSteps(model[0], 0.1, 20)


def test_a_fallback_recipe_keeps_the_forward_in_bf16():
    model, x = nn.Sequential(_layer("tensorwise")), _x(16, K)
    fallback = Fallback(
        [("0", model[0])], [], FP8Config(recipe="tensorwise", monitor=1, on_alarm="rowwise")
    )
    set_forward_precision(model, "bf16")
    for fallen in ({}, {"0": {"since": 0, "last": 0, "why": ""}}, {}):
        fallback.load_state_dict({"fallen": fallen, "times": {}})
        assert model[0].fp8.recipe.name == ("rowwise" if fallen else "tensorwise")
        assert torch.equal(model(x), F.linear(x, model[0].weight, model[0].bias))


def test_last_steps_switch_once_at_their_step():
    model = nn.Sequential(nn.Linear(K, N))
    convert_to_float8(model, "tensorwise")
    last, seen = LastSteps(model, 0.1, 20), []
    for step in range(20):
        last.before(step)
        seen.append(model[0].fp8.recipe.bf16_forward)
    assert seen == [False] * 18 + [True] * 2
    assert "from step 19 of 20" in str(last)
    resumed = LastSteps(model, 0.1, 20)
    resumed.before(19)
    assert model[0].fp8.recipe.bf16_forward
    convert_to_float8(model, "rowwise")
    resumed.before(19)
    assert model[0].fp8.recipe.bf16_forward
    resumed.before(3)  # a second run of the same model
    assert not model[0].fp8.recipe.bf16_forward
    assert LastSteps(model, 0.001, 20).first == 19  # never none
    assert LastSteps(model, 1.0, 20).first == 0


def test_mistakes():
    model = nn.Sequential(nn.Linear(K, N))
    with pytest.raises(ValueError, match="has no FP8 layer"):
        set_forward_precision(model, "bf16")
    LastSteps(model, 0.5, 2).before(1)  # as `auto` may leave all layers in BF16
    with pytest.raises(ValueError, match="set_forward_precision"):
        convert_to_float8(model, FP8Config(bf16_last=0.05))
    assert type(model[0]) is nn.Linear
    assert torch_fp8.conversion_report(model, FP8Config(bf16_last=0.05)).num_converted == 1
    convert_to_float8(model, "tensorwise")
    with pytest.raises(ValueError, match=r"did you mean 'bf16'\?"):
        set_forward_precision(model, "bf15")
    with pytest.raises(TypeError, match=r"takes an nn\.Module"):
        set_forward_precision([model], "bf16")
    with pytest.raises(ValueError, match=r"from 0 to 1, got 1\.5: it is a share"):
        FP8Config(bf16_last=1.5)
    with pytest.raises(TypeError, match="takes a number"):
        FP8Config(bf16_last="0.05")
    with pytest.raises(ValueError, match="merge_aware=True excludes bf16_last"):
        FP8Config(bf16_last=0.05, merge_aware=True)
    with pytest.raises(ValueError, match="backend"):
        FP8Config(bf16_last=0.05, backend="transformer-engine")
    assert FP8Config.from_json(FP8Config(bf16_last=0.05).to_json()).bf16_last == 0.05
