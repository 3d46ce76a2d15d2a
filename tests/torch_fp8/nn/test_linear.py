import copy
import math
import sys

import pytest
import torch
from torch import nn

import torch_fp8
from tests.internals import GEMMS, RECIPES, delayed_scaling, scaling_buffers, sqnr_db
from tests.steps import adamw, assert_equal, gaussian, renew_scales, saved_bytes, train
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, revert
from torch_fp8.ops import scaled_mm

K, N = 96, 80


def _pair(recipe="tensorwise", bias=True, **options):
    """The same layer in float32 and in FP8."""
    stock = nn.Sequential(nn.Linear(K, N, bias=bias))
    fp8 = copy.deepcopy(stock)
    torch_fp8.convert_to_float8(fp8, FP8Config(recipe=recipe, **options))
    return stock, fp8


def _run(model, x, grad=None):
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(torch.ones_like(y) if grad is None else grad.to(y.dtype))
    return y.detach(), x.grad, model[0].weight.grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_gradients_reach_the_floors(recipe):
    stock, fp8 = _pair(recipe)
    x, grad = torch.randn(128, K), torch.randn(128, N)
    backward_floor = 24.6 if recipe in ("tensorwise", "delayed") else 28.5
    floors = (28.5, backward_floor, backward_floor)
    for exact, ours, floor in zip(_run(stock, x, grad), _run(fp8, x, grad), floors, strict=True):
        assert sqnr_db(exact, ours) > floor - 0.6


@pytest.mark.parametrize("recipe", RECIPES)
def test_wgrad_in_high_precision(recipe):
    stock, fp8 = _pair(recipe, wgrad="bf16")
    x, grad = torch.randn(128, K), torch.randn(128, N)
    exact, ours = _run(stock, x, grad)[2], _run(fp8, x, grad)[2]
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("gemm", GEMMS)
def test_the_named_product_alone_accumulates_fast(gemm, monkeypatch):
    _, fp8 = _pair(fast_accum=(gemm,))
    fast, multiply = [], scaled_mm._multiply
    monkeypatch.setattr(scaled_mm, "_multiply", lambda *a: fast.append(a[5]) or multiply(*a))
    _run(fp8, torch.randn(16, K))
    assert fast == [name == gemm for name in GEMMS]


def test_non_contiguous_gradient():
    _, fp8 = _pair()
    x, grad = torch.randn(7, K), torch.randn(1).expand(7, N)
    for strided, plain in zip(_run(fp8, x, grad), _run(fp8, x, grad.clone()), strict=True):
        assert torch.equal(strided, plain)


@pytest.mark.parametrize("sizes", [(17, 33), (16, 31), (300, 16)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_in_and_out_features(recipe, sizes):
    stock = nn.Sequential(nn.Linear(*sizes))
    fp8 = copy.deepcopy(stock)
    torch_fp8.convert_to_float8(fp8, FP8Config(recipe=recipe))
    x = torch.randn(19, sizes[0])
    for exact, ours in zip(_run(stock, x), _run(fp8, x), strict=True):
        assert sqnr_db(exact, ours) > 22


def test_a_frozen_weight_costs_no_wgrad_and_saves_nothing_for_it(scaled_mm_calls):
    _, fp8 = _pair(bias=False)
    x = torch.randn(64, K, requires_grad=True)
    trained = saved_bytes(fp8, x)
    assert 64 * K <= trained <= 64 * K + 16  # the transposed FP8 input, and scales
    fp8.zero_grad()
    fp8.requires_grad_(False)
    assert saved_bytes(fp8, x) <= 16
    y = fp8(x)
    scaled_mm_calls.clear()
    y.sum().backward()
    assert len(scaled_mm_calls) == 1
    assert fp8[0].weight.grad is None
    assert x.grad is not None


def test_an_input_without_gradient_costs_no_dgrad(scaled_mm_calls):
    _, fp8 = _pair()
    fp8(torch.randn(8, K)).sum().backward()
    assert len(scaled_mm_calls) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_grad_forward_builds_nothing_for_a_backward(spy, recipe):
    from tests.internals import quantizer

    layouts = spy(quantizer, "quantize_layouts", lambda _, to: (to.rowwise, to.columnwise))
    _, fp8 = _pair(recipe)
    with torch.no_grad():
        y = fp8(torch.randn(8, K))
    assert layouts == [(True, False), (True, False)]
    assert not y.requires_grad


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(), (8, 65)])
def test_wrong_input_shapes_are_refused_with_the_place(shape, training):
    model = nn.Sequential(nn.Linear(64, 128))
    convert_to_float8(model, FP8Config(recipe="tensorwise"))
    with torch.set_grad_enabled(training):
        model.train(training)(torch.randn(4, 64))
        with pytest.raises(ValueError, match=r"'0' takes inputs \(..., 64\), got \("):
            model(torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64], ids=str)
def test_wrong_input_dtypes_are_refused_with_the_place(dtype):
    _, fp8 = _pair()
    with pytest.raises(TypeError, match=r"'0'.*float32, bfloat16 or float16"):
        fp8(torch.ones(4, K).to(dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_bad_activations_and_gradients_stay_visible(recipe, bad):
    _, fp8 = _pair(recipe)
    _run(fp8, torch.randn(8, K))  # fills a history, so that delayed scaling has a finite scale
    x = torch.randn(8, K)
    x[3, 4] = bad
    assert not _run(fp8, x)[0].isfinite().all()
    grad = torch.randn(8, N)
    grad[2, 5] = bad
    _, dx, dw = _run(fp8, torch.randn(8, K), grad)
    assert not dx.isfinite().all()
    assert not dw.isfinite().all()


def test_evaluation_in_high_precision_by_choice(scaled_mm_calls):
    stock, fp8 = _pair(eval_fp8=False)
    x = torch.randn(4, K)
    assert torch.equal(fp8.eval()(x), stock(x))
    assert not scaled_mm_calls
    fp8.train()(x)
    assert len(scaled_mm_calls) == 1
    _, default = _pair()
    default.eval()(x)
    assert len(scaled_mm_calls) == 2


@pytest.mark.parametrize("shape", [(4, K), (2, 3, K)], ids=str)
def test_an_output_may_be_written_to_in_place(shape):
    model = nn.Sequential(nn.Linear(K, 50), nn.ReLU(inplace=True))
    torch_fp8.convert_to_float8(model)
    x = torch.randn(shape)
    y = model(x)
    y.sum().backward()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y)


def test_delayed_scaling_uses_the_past_and_records_the_present():
    _, fp8 = _pair("delayed", amax_history_len=4)
    history = fp8[0].fp8_amax_history
    for step in range(6):
        _run(fp8, torch.full((2, K), float(step + 1)))
        _run(fp8, torch.full((2, K), 0.5))  # of several micro-batches the largest amax counts
        renew_scales()
    assert history.shape == (3, 4)
    assert history[0].tolist() == [6, 5, 4, 3]
    assert torch.equal(history[1], fp8[0].weight.detach().abs().max().expand(4))
    assert (history[2] == 1).all()
    y, _, _ = _run(fp8, torch.full((2, K), 100.0))  # 100 saturates at the largest amax seen, 6
    expected = nn.functional.linear(torch.full((2, K), 6.0), fp8[0].weight, fp8[0].bias)
    assert sqnr_db(expected, y) > 25


def test_an_operand_of_zeros_is_expected_to_be_as_large_as_elsewhere():
    """The gradient of a layer in front of one that begins with zeros, as that of an adapter."""
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K), nn.Linear(K, N))
    nn.init.zeros_(model[1].weight)
    torch_fp8.convert_to_float8(model, FP8Config(recipe="delayed"))
    _run(model, torch.randn(4, K), 1e-6 * torch.randn(4, N))
    renew_scales()
    assert (model[0].fp8_amax_history[2] == 0).all()
    first, second, third = (scaling_buffers(layer)[1][2] for layer in model)
    assert (first == max(second[0], third[0])).all()
    with torch.no_grad():
        model[1].weight.normal_()
    model.zero_grad()
    _run(model, torch.randn(4, K), 1e-6 * torch.randn(4, N))
    assert model[0].weight.grad.any()


def test_a_step_that_a_cuda_graph_captures_renews_scales_in_place(monkeypatch):
    _, fp8 = _pair("delayed")
    _run(fp8, torch.randn(4, K))
    renew_scales()
    scales = [source.scale for source in fp8[0].fp8.scaling.sources(fp8[0])]
    before = [scale.clone() for scale in scales]
    monkeypatch.setattr(delayed_scaling, "is_capturing", lambda device: True)
    _run(fp8, 9 * torch.randn(4, K), 9 * torch.randn(4, N))
    renew_scales()
    assert all(
        s.scale is scale
        for s, scale in zip(fp8[0].fp8.scaling.sources(fp8[0]), scales, strict=True)
    )
    assert [bool(s == b) for s, b in zip(scales, before, strict=True)] == [False, True, False]


def test_scales_that_a_backward_needs_outlive_a_step():
    """As a GAN's second network makes one between a forward and its backward."""
    _, fp8 = _pair("delayed")
    for _ in range(2):
        _run(fp8, torch.randn(4, K))
        renew_scales()
    twin = copy.deepcopy(fp8)
    x, grads = torch.randn(4, K) * 3, []
    for model, between in ((fp8, renew_scales), (twin, lambda: None)):
        y = model(x)
        before = model[0].fp8_scales[2, 0].clone()
        between()
        model[0].fp8.scaling.sources(model[0])[2].scale = before
        model.zero_grad()
        y.sum().backward()
        grads.append(model[0].weight.grad)
    assert torch.equal(*grads)


@pytest.fixture
def filled_memory():
    """Memory that nobody has initialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


_OUT_OF_META = {
    "to_empty": lambda model, values: model.to_empty(device="cpu"),
    "loaded": lambda model, values: model.to_empty(device="cpu").load_state_dict(values),
    "assigned": lambda model, values: model.load_state_dict(values, assign=True),
    "cast": lambda model, values: model.to_empty(device="cpu").to(torch.bfloat16),
}


@pytest.mark.parametrize("way", _OUT_OF_META)
def test_delayed_scaling_begins_empty_behind_the_meta_device(filled_memory, way):
    values = nn.Sequential(nn.Linear(K, N)).state_dict()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(K, N))
    fresh = nn.Sequential(nn.Linear(K, N))
    for each in (model, fresh):
        torch_fp8.convert_to_float8(each, FP8Config(recipe="delayed"))
    _OUT_OF_META[way](model, values)
    for buffer, expected in zip(model.buffers(), fresh.buffers(), strict=True):
        assert torch.equal(buffer, expected)
    for each in (model, fresh):
        each.float().load_state_dict(values)
    x = torch.randn(2, K)
    assert torch.equal(model(x), fresh(x))


def test_memory_that_is_made_anew_keeps_the_history(filled_memory):
    model = nn.Sequential(nn.Linear(K, N))
    torch_fp8.convert_to_float8(model, FP8Config(recipe="delayed"))
    model(torch.randn(2, K))
    before = [buffer.clone() for buffer in model.buffers()]
    model.to_empty(device="cpu")
    assert all(map(torch.equal, model.buffers(), before))


@pytest.mark.parametrize("options", [{}, {"wgrad": "bf16"}], ids=["wgrad-fp8", "wgrad-bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_give_the_same_values(recipe, options):
    eager = nn.Sequential(nn.Linear(K, 64), nn.SiLU(), nn.Linear(64, K))
    torch_fp8.convert_to_float8(eager, FP8Config(recipe=recipe, **options))
    compiled = copy.deepcopy(eager)
    compiled.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    x = gaussian(2, 24, K, dtype=torch.float32)
    assert_equal(train(eager, x), train(compiled, x))
    assert all(map(torch.equal, eager.buffers(), compiled.buffers()))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="inductor's CPU code needs a C++ compiler")
def test_inductor_agrees_with_eager():
    _, fp8 = _pair()
    x = torch.randn(32, K)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = _run(fp8, x)
        fp8.compile(fullgraph=True)
        ours = _run(fp8, x)
    # Inductor adds the bias in float32 and rounds once; eager rounds to bfloat16 before and after.
    assert sqnr_db(expected[0], ours[0]) > 45
    for a, b in zip(expected[1:], ours[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_of_the_bias_is_the_sum_of_the_gradient(recipe):
    """In float32, rounded once: nearer than torch's own in BF16."""
    _, fp8 = _pair(recipe)
    fp8 = fp8.bfloat16()
    x, grad = torch.randn(3, 100, K).bfloat16(), torch.randn(3, 100, N).bfloat16()
    for frozen_weight in (False, True):
        for needs_input in (False, True):
            fp8[0].weight.requires_grad_(not frozen_weight)
            fp8.zero_grad()
            fp8(x.detach().requires_grad_(needs_input)).backward(grad)
            exact = grad.double().sum((0, 1))
            assert fp8[0].bias.grad.dtype == torch.bfloat16
            assert (fp8[0].bias.grad - exact).abs().max() <= 2**-8 * exact.abs().max()
            assert torch.equal(fp8[0].bias.grad, grad.float().sum((0, 1)).bfloat16())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_float32_bias_keeps_a_float32_gradient_under_autocast(recipe):
    _, fp8 = _pair(recipe)
    grad = torch.randn(64, N).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        fp8(torch.randn(64, K)).backward(grad)
    torch.testing.assert_close(fp8[0].bias.grad, grad.float().sum(0), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bias_is_added_before_the_one_rounding(recipe):
    """As exact as the float32 sum allows; two roundings lose half a bit of it."""
    _, fp8 = _pair(recipe)
    with torch.no_grad():
        fp8[0].bias.copy_(fp8[0].bias.bfloat16())  # the operator takes it in the output's dtype
    exact = copy.deepcopy(fp8)
    x = torch.randn(64, K)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = fp8(x)
    with torch.no_grad():
        assert torch.equal(rounded, exact(x).bfloat16())


def test_a_frozen_bias_costs_nothing(monkeypatch):
    from tests.internals import quantizer

    asked = []
    monkeypatch.setattr(quantizer, "quantize_layouts_and_sum", asked.append)
    for recipe in RECIPES:
        _, fp8 = _pair(recipe)
        fp8[0].bias.requires_grad_(False)
        fp8(torch.randn(8, K)).sum().backward()
        assert fp8[0].bias.grad is None
        assert fp8[0].weight.grad is not None
    assert asked == []


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_model_made_double_after_conversion_is_told_at_once(level):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer, _ = adamw(model, FP8Config(opt_level=level))
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    model.double()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"'0' is torch.float64, as model.double\(\) makes it"),
    ):
        model(torch.randn(4, 64))
    with pytest.raises(TypeError, match="'0' takes float32, bfloat16 or float16 input"):
        model(torch.randn(4, 64).double())
    revert(model)
    assert model(torch.randn(4, 64).double()).dtype == torch.float64


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_model_made_half_after_conversion_trains(recipe, level):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    config = FP8Config(recipe=recipe, opt_level=level)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)  # 1e-8 is 0 in float16
    convert_to_float8(model, config)
    convert_optimizer(optimizer, config, model=model)
    model.half()
    losses = []
    for _ in range(4):
        output = model(torch.ones(4, 64, dtype=torch.float16))
        losses.append((output.float() - 1).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert output.dtype == model[0].weight.dtype == torch.float16
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_on_the_meta_device_shapes_go_through(recipe):
    norm = nn.RMSNorm(64, eps=1e-6)
    model = nn.Sequential(norm, nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to("meta")
    convert_to_float8(model, FP8Config(recipe=recipe))
    x = torch.randn(8, 64, device="meta", requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert (y.shape, y.device.type, y.dtype) == ((8, 64), "meta", torch.float32)
    y.sum().backward()
    assert x.grad.shape == (8, 64)
    assert model[1].weight.grad.shape == (128, 64)


class _Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.q, self.k = norm, nn.Linear(64, 96), nn.Linear(64, 96, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.q(x) * self.k(x)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("norm", [nn.Identity(), nn.RMSNorm(64, eps=1e-6), nn.LayerNorm(64)])
def test_jagged_nested_tensors_are_computed_as_their_tokens(recipe, norm):
    rows = [torch.randn(5, 64), torch.randn(11, 64)]
    model = _Block(copy.deepcopy(norm))
    stock = copy.deepcopy(model)
    convert_to_float8(model, recipe)
    grads = []
    for module in (stock, model):
        x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        assert y.is_nested
        assert [tuple(part.shape) for part in y.unbind()] == [(5, 96), (11, 96)]
        y.values().float().square().sum().backward()
        grads.append((y.values().detach(), x.grad.values(), module.q.weight.grad))
        with torch.no_grad():
            assert module(x).shape == y.shape
    for expected, got in zip(*grads, strict=True):
        assert (got - expected).norm() < 0.15 * expected.norm()


_OTHER_INPUTS = {
    "sparse": (lambda x: x.to_sparse(), "takes dense inputs, got torch.sparse_coo"),
    "csr": (lambda x: x.to_sparse_csr(), "takes dense inputs, got torch.sparse_csr"),
    "mkldnn": (lambda x: x.to_mkldnn(), "takes dense inputs, got torch._mkldnn"),
    "list": (lambda x: x.tolist(), "takes a tensor, got list"),
    "array": (lambda x: x.numpy(), "takes a tensor, got ndarray"),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", _OTHER_INPUTS)
@pytest.mark.parametrize("evaluation", [False, True])
def test_an_input_that_is_no_dense_tensor_is_refused_by_name(kind, evaluation):
    model = nn.Sequential(nn.Linear(K, N))
    convert_to_float8(model, FP8Config(recipe="tensorwise"))
    make, message = _OTHER_INPUTS[kind]
    model.train(not evaluation)
    with torch.set_grad_enabled(not evaluation), pytest.raises(TypeError, match=f"'0' {message}"):
        model(make(torch.randn(4, K)))
