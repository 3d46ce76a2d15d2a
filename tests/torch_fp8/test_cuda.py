import copy

import pytest
import torch
from torch import nn

import torch_fp8
from tests.internals import RECIPES, CastOptions, halves_module, make_recipe, sqnr_db
from torch_fp8 import FP8Config
from torch_fp8.ops.hardware import check_device
from torch_fp8.ops.quantize import quantize_layouts
from torch_fp8.ops.scaled_mm import scaled_matmul

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(params=RECIPES)
def recipe(request):
    try:
        check_device(CUDA, request.param, emulate=False)
    except ValueError as error:
        pytest.skip(str(error))
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(256, 512, 384), (1000, 208, 72), (1, 16, 16), (77, 300, 130)])
def test_native_gemm_agrees_with_the_reference(recipe, shape, dtype):
    """>= 50 dB with full accumulation; every shape goes through padding."""
    m, k, n = shape
    spec = make_recipe(recipe)
    x, w, g = (torch.randn(*s, device=CUDA) for s in ((m, k), (n, k), (m, n)))
    x_row, x_col = quantize_layouts(x, CastOptions.of(spec.input, rowwise=True, columnwise=True))
    w_row, w_col = quantize_layouts(w, CastOptions.of(spec.weight, rowwise=True, columnwise=True))
    g_row, g_col = quantize_layouts(
        g, CastOptions.of(spec.grad_output, rowwise=True, columnwise=True)
    )
    for a, b in ((x_row, w_row), (g_row, w_col), (g_col, x_col)):
        result = scaled_matmul(a, b, dtype)
        assert result.shape == (a.qdata.shape[0], b.qdata.shape[0])
        # The payload of one operand may have zeros behind the columns that are contracted.
        assert sqnr_db(scaled_matmul(a, b, torch.float32, emulate=True), result) >= 50


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_layer_agrees_with_the_cpu(recipe, wgrad):
    model = nn.Sequential(nn.Linear(272, 144))
    on_card = copy.deepcopy(model).to(CUDA)
    config = FP8Config(recipe=recipe, wgrad=wgrad, fast_accum=())
    torch_fp8.convert_to_float8(model, config)
    torch_fp8.convert_to_float8(on_card, config)
    for _ in range(3):
        x, grad = torch.randn(5, 40, 272), torch.randn(5, 40, 144)
        results = []
        for net in (model, on_card):
            device = net[0].weight.device
            leaf = x.to(device, copy=True).requires_grad_()
            net.zero_grad()
            y = net(leaf)
            y.backward(grad.to(device))
            results.append([t.cpu() for t in (y, leaf.grad, net[0].weight.grad)])
        for expected, ours in zip(*results, strict=True):
            assert sqnr_db(expected, ours) > 40


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_with_gradients_moves_to_the_cpu_and_back(level):
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).to(CUDA)
    config = FP8Config(recipe="tensorwise", opt_level=level)
    torch_fp8.convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters())
    torch_fp8.convert_optimizer(optimizer, config, model=model)
    for device in (CUDA, torch.device("cpu"), CUDA):
        model.to(device)
        assert {p.device.type for p in model.parameters()} == {device.type}
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert {grad.device.type for grad in grads} <= {device.type}
        if device == CUDA:
            optimizer.zero_grad()
            model(torch.randn(64, 256, device=device)).sum().backward()
            optimizer.step()


def test_compiled_layer_gives_the_same_values(recipe):
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(CUDA)
    torch_fp8.convert_to_float8(model, FP8Config(recipe=recipe))
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True)
    x = torch.randn(64, 256, device=CUDA)
    for net, source in ((model, model), (compiled, twin)):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            net(x).float().square().sum().backward()
        assert all(p.grad.abs().sum() > 0 for p in source.parameters())
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert sqnr_db(a.grad, b.grad) > 25


def test_no_tokens(recipe):
    model = nn.Linear(64, 32).to(CUDA)
    torch_fp8.convert_to_float8(model, FP8Config(recipe=recipe))
    model(torch.randn(0, 64, device=CUDA)).sum().backward()
    assert (model.weight.grad == 0).all()


def test_a_recipe_that_the_card_lacks_runs_emulated_when_asked():
    for recipe in RECIPES:
        model = nn.Linear(64, 32).to(CUDA)
        torch_fp8.convert_to_float8(model, FP8Config(recipe=recipe, emulate=True))
        model(torch.randn(8, 64, device=CUDA)).sum().backward()
        assert model.weight.grad.isfinite().all()


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_the_optimizer_step_writes_the_payload_of_a_weight(recipe, spy):
    try:
        check_device(CUDA, recipe, emulate=False)
    except ValueError as error:
        pytest.skip(str(error))
    cast = spy(halves_module, "quantize_layouts", lambda x, *_, **options: tuple(x.shape))
    weights = []
    for kept in (False, True):
        cast.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 256)).to(CUDA)
        torch_fp8.convert_to_float8(model, FP8Config(recipe=recipe))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = FP8Config(recipe=recipe, cache_weights=kept)
        torch_fp8.convert_optimizer(optimizer, config, model=model)
        for step in range(5):
            for seed in (2 * step, 2 * step + 1):
                generator = torch.Generator(CUDA).manual_seed(seed)
                x = torch.randn(64, 256, device=CUDA, generator=generator)
                with torch.autocast("cuda", torch.bfloat16):
                    model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert cast == [(384, 256), (256, 384)]
    assert all(map(torch.equal, *weights))
