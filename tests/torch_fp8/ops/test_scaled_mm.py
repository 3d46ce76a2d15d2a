import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.internals import (
    E4M3,
    RECIPES,
    CastOptions,
    CastSpec,
    make_recipe,
    sqnr_db,
    worst_row_sqnr_db,
)
from torch_fp8.ops import gemm_operand, scaled_mm
from torch_fp8.ops.gemm_operand import aligned_operand, operand
from torch_fp8.ops.hardware import check_device
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize, quantize_layouts
from torch_fp8.ops.scaled_mm import scaled_matmul, scaled_matmul_reference

M, K, N = 384, 512, 320
GEMM_SQNR_DB = {("e4m3", "e4m3"): 28.5, ("e5m2", "e4m3"): 24.6}
"""The SQNR in dB of a GEMM with Gaussian operands in these formats, for any shape."""


def both_layouts(x, spec):
    return quantize_layouts(x, CastOptions.of(spec, rowwise=True, columnwise=True))


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_each_gemm_reaches_the_floor_of_its_formats(recipe_name):
    """Global SQNR within 0.5 dB of the floor, worst row within 2 dB (contractions >= 256)."""
    recipe = make_recipe(recipe_name)
    x, w, g = torch.randn(M, K), torch.randn(N, K), torch.randn(M, N)
    (x_row, x_col), (w_row, w_col), (g_row, g_col) = (
        both_layouts(*pair)
        for pair in ((x, recipe.input), (w, recipe.weight), (g, recipe.grad_output))
    )
    gemms = {
        "fprop": (recipe.fprop, x_row, w_row, x @ w.t()),
        "dgrad": (recipe.dgrad, g_row, w_col, g @ w),
        "wgrad": (recipe.wgrad, g_col, x_col, g.t() @ x),
    }
    for name, (spec, a, b, exact) in gemms.items():
        floor = GEMM_SQNR_DB[spec.a.format.name, spec.b.format.name]
        result = scaled_matmul(a, b, torch.float32)
        assert sqnr_db(exact, result) == pytest.approx(floor, abs=0.5), name
        assert worst_row_sqnr_db(exact, result) >= floor - 2, name


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_autocast_does_not_round_the_operands(recipe_name):
    recipe = make_recipe(recipe_name)
    a, b = quantize(torch.randn(8, 64), recipe.input), quantize(torch.randn(16, 64), recipe.weight)
    expected = scaled_matmul(a, b, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scaled_matmul(a, b, torch.float32), expected)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 17, 33), (31, 129, 16), (7, 300, 1)], ids=str)
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_any_shape(recipe_name, shape):
    m, k, n = shape
    recipe = make_recipe(recipe_name)
    a, b = quantize(torch.randn(m, k), recipe.input), quantize(torch.randn(n, k), recipe.weight)
    torch.testing.assert_close(
        scaled_matmul(a, b, torch.float32), scaled_matmul_reference(a, b, torch.float32)
    )


@pytest.mark.parametrize("shape", [(0, 32, 16), (16, 32, 0), (16, 0, 16)], ids=str)
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_empty_operands_give_zeros(recipe_name, shape):
    m, k, n = shape
    recipe = make_recipe(recipe_name)
    a, b = quantize(torch.randn(m, k), recipe.input), quantize(torch.randn(n, k), recipe.weight)
    for bias in (torch.zeros(n), torch.ones(n)):
        got = scaled_matmul(a, b, torch.bfloat16, bias=bias)
        assert torch.equal(got, bias.bfloat16().expand(m, n))


@pytest.mark.parametrize("recipe_name", ["tensorwise", "delayed", "rowwise"])
def test_runs_the_real_operator_on_the_cpu(scaled_mm_calls, recipe_name):
    if recipe_name == "rowwise" and not scaled_mm._CPU_HAS_OPERATOR:
        pytest.skip("torch 2.11's CPU operator is tensorwise only")
    recipe = make_recipe(recipe_name)
    a, b = quantize(torch.randn(8, 32), recipe.input), quantize(torch.randn(16, 32), recipe.weight)
    scaled_matmul(a, b, torch.float32, fast_accum=True)
    scaled_matmul(a, b, torch.float32)
    assert [call["use_fast_accum"] for call in scaled_mm_calls] == [True, False]


def _pretend_card(monkeypatch, capability, cuda="13.0", name="NVIDIA Pretend"):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.version, "cuda", cuda)


CUDA = torch.device("cuda")


def test_an_old_card_is_named_with_what_to_do(monkeypatch):
    _pretend_card(monkeypatch, (8, 0), name="NVIDIA A100")
    with pytest.raises(ValueError, match=r"A100 \(sm_80\).*BF16.*emulate=True"):
        check_device(CUDA, "tensorwise", emulate=False)
    check_device(CUDA, "tensorwise", emulate=True)


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((8, 9), {"tensorwise", "delayed", "rowwise"}),
        ((9, 0), {"tensorwise", "delayed", "rowwise", "blockwise"}),
        ((10, 0), {"tensorwise", "delayed", "rowwise", "mxfp8"}),
    ],
    ids=["ada", "hopper", "blackwell"],
)
def test_a_recipe_that_the_card_lacks_raises_and_names_the_others(monkeypatch, capability, runs):
    _pretend_card(monkeypatch, capability)
    for recipe in RECIPES:
        if recipe in runs:
            check_device(CUDA, recipe, emulate=False)
            continue
        with pytest.raises(ValueError, match=f"'{recipe}'") as raised:
            check_device(CUDA, recipe, emulate=False)
        assert all(other in str(raised.value) for other in runs)
        check_device(CUDA, recipe, emulate=True)


def test_blocks_need_cuda_12_9(monkeypatch):
    _pretend_card(monkeypatch, (9, 0), cuda="12.8")
    with pytest.raises(ValueError, match=r"12\.9"):
        check_device(CUDA, "blockwise", emulate=False)


def test_other_accelerators_are_refused():
    with pytest.raises(ValueError, match="'mps'"):
        check_device(torch.device("mps"), "tensorwise", emulate=False)


@pytest.mark.parametrize(
    "shape", [(256, 256, 384), (100, 200, 72), (100, 208, 72), (1, 16, 16)], ids=str
)
@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("multiple", [1, 256], ids=["", "more rows"])
def test_cuda_operands_pass_the_operators_own_checks(monkeypatch, recipe_name, shape, multiple):
    """torch's shape function for CUDA checks alignment, strides and the scales' layout."""
    _pretend_card(monkeypatch, (10, 0) if recipe_name == "mxfp8" else (9, 0))
    recipe = make_recipe(recipe_name)
    m, k, n = shape
    x, w, g = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    (x_row, x_col), (w_row, w_col), (g_row, g_col) = (
        both_layouts(*pair)
        for pair in ((x, recipe.input), (w, recipe.weight), (g, recipe.grad_output))
    )
    for a, b in ((x_row, w_row), (g_row, w_col), (g_col, x_col)):
        contracted = min(a.qdata.shape[1], b.qdata.shape[1])
        operands = (
            operand(a, contracted, is_b=False, row_multiple=multiple),
            operand(b, contracted, is_b=True),
        )
        with FakeTensorMode():
            on_cuda = [q._replace(qdata=_fake(q.qdata), scale=_fake(q.scale)) for q in operands]
            a_cuda, b_cuda = on_cuda
            arguments = scaled_mm._arguments(b_cuda)
            output = scaled_mm._scaled_mm(a_cuda, arguments, torch.bfloat16, False, None)
        assert output.device.type == "cuda"
        assert output.shape[0] >= a.qdata.shape[0]
        assert output.shape[1] >= b.qdata.shape[0]


def _fake(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


@pytest.mark.parametrize("rows", [144, 137, 1])
@pytest.mark.parametrize("cols", [300, 128, 100])
@pytest.mark.parametrize("granularity", ["block_1x128", "block_128x128"])
def test_cuda_scales_have_the_strides_that_the_operator_asks_for(granularity, cols, rows):
    """By torch's ScaledBlas.cpp, of all versions the strictest: also of one block, padded or not.

    128x128: (L rounded up to 4, R) with strides (1, that L).
    """
    spec = CastSpec(E4M3, granularity, power_of_two=True)
    for x in both_layouts(torch.randn(rows, cols), spec):
        for is_b in (False, True) if granularity == "block_1x128" else (True,):
            padded = operand(x, x.qdata.shape[1], is_b=is_b)
            num_rows, num_blocks = padded.qdata.shape[0], padded.qdata.shape[1] // 128
            shape = (num_rows, num_blocks)
            if granularity == "block_128x128":
                shape = (-(-num_blocks // 4) * 4, num_rows // 128)
            assert padded.scale.shape == shape
            assert padded.scale.stride() == (1, shape[0])


@pytest.mark.parametrize("granularity", ["rowwise", "block_1x128", "block_128x128"])
def test_cuda_padding_keeps_the_product(granularity):
    recipe = make_recipe({"rowwise": "rowwise"}.get(granularity, "blockwise"))
    spec = recipe.weight if granularity == "block_128x128" else recipe.input
    q = quantize(torch.randn(70, 200), spec)
    padded = operand(q, 200, is_b=True)
    rows, cols = padded.qdata.shape
    assert rows % 16 == 0
    assert cols % 16 == 0
    scale = padded.scale
    if granularity == "block_1x128":
        assert scale.stride() == (1, rows)
    if granularity == "block_128x128":
        assert scale.shape[0] % 4 == 0
        assert scale.stride()[0] == 1
        scale = scale.t()[:, : -(-cols // 128)]
    back = dequantize(padded._replace(scale=scale))
    assert torch.equal(back[:70, :200], dequantize(q))
    assert (back[70:] == 0).all()
    assert (back[:, 200:] == 0).all()


def test_e8m0_scales_lie_where_the_tensor_core_looks():
    rows, blocks = 200, 6
    exponents = torch.randint(-100, 100, (rows, blocks))
    flat = gemm_operand._swizzled_e8m0(2.0 ** exponents.float()).view(torch.uint8)
    assert flat.numel() == 256 * 8
    for row, block in ((0, 0), (31, 3), (32, 0), (127, 5), (128, 4), (199, 5)):
        tile = (row // 128) * 2 + block // 4
        r = row % 128
        offset = tile * 512 + (r % 32) * 16 + (r // 32) * 4 + block % 4
        assert flat[offset].item() == exponents[row, block].item() + 127


@pytest.mark.parametrize(
    ("capability", "cuda", "asked_for"),
    [
        ((9, 0), "12.9", torch.float32),
        ((9, 0), "13.0", torch.float32),
        ((9, 0), "12.8", torch.bfloat16),
        ((8, 9), "13.0", torch.bfloat16),
        ((10, 0), "13.0", torch.bfloat16),
    ],
    ids=["hopper", "hopper, CUDA 13", "hopper, CUDA 12.8", "ada", "blackwell"],
)
def test_rowwise_writes_float32_where_the_kernel_does(monkeypatch, capability, cuda, asked_for):
    """cuBLASLt does, which torch calls on Hopper from CUDA 12.9 on; CUTLASS's kernel does not."""
    _pretend_card(monkeypatch, capability, cuda)
    scaled_mm._rowwise_dtype.cache_clear()
    recipe = make_recipe("rowwise")
    a, b = quantize(torch.randn(32, 64), recipe.input), quantize(torch.randn(48, 64), recipe.weight)
    asked = []

    def operator(a, b, out_dtype, *rest):
        asked.append(out_dtype)
        return torch.zeros(32, 48, dtype=out_dtype, device="meta")

    monkeypatch.setattr(scaled_mm, "_product", operator)
    with FakeTensorMode():
        a, b = (q._replace(qdata=_fake(q.qdata), scale=_fake(q.scale)) for q in (a, b))
        made = [
            scaled_mm.multiply_laid_out(a, scaled_mm.lay_out(b, 64), d, False, None)
            for d in (torch.float32, torch.bfloat16)
        ]
    scaled_mm._rowwise_dtype.cache_clear()
    assert asked == [asked_for, torch.bfloat16]
    assert [output.dtype for output in made] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bias_is_added_before_the_one_rounding(recipe_name, dtype):
    recipe = make_recipe(recipe_name)
    x, w, bias = torch.randn(24, 64), torch.randn(40, 64), torch.randn(40)
    x_row, w_row = quantize(x, recipe.input), quantize(w, recipe.weight)
    made = scaled_mm.scaled_matmul(x_row, w_row, dtype, bias=bias)
    plain = scaled_mm.scaled_matmul(x_row, w_row, torch.float32)
    expected = (plain + bias.to(dtype)).to(dtype)
    torch.testing.assert_close(made, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    empty = x_row._replace(qdata=x_row.qdata[:0])
    assert scaled_mm.scaled_matmul(empty, w_row, dtype, bias=bias).shape == (0, 40)


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_card_the_gemm_takes_a_bias_where_it_can(monkeypatch, recipe_name, dtype):
    recipe, given = make_recipe(recipe_name), []

    def operator(a, b, out_dtype, fast_accum, bias=None):
        given.append(bias)
        output = torch.zeros(a.qdata.shape[0], b.operand.qdata.shape[0], dtype=out_dtype)
        return output if bias is None else output + bias

    monkeypatch.setattr(scaled_mm, "_product", operator)
    bias = torch.randn(40).to(dtype)
    a, b = quantize(torch.randn(24, 64), recipe.input), quantize(torch.randn(40, 64), recipe.weight)
    made = scaled_mm.multiply_laid_out(a, scaled_mm.lay_out(b, 64), dtype, False, bias)
    assert torch.equal(made, bias.expand(24, 40))
    (in_gemm,) = given
    fits = recipe_name in ("tensorwise", "delayed", "rowwise") and dtype != torch.float32
    assert (in_gemm is not None) == fits
    if fits:
        assert in_gemm.shape == (48,)


@pytest.mark.parametrize("part", ["qdata", "scale"])
def test_an_operand_in_the_middle_of_memory_is_copied(part):
    memory = {"qdata": torch.ones(257).to(torch.float8_e4m3fn), "scale": torch.ones(2)}
    start = {"qdata": 0, "scale": 0, part: 1}
    qdata = memory["qdata"][start["qdata"] :][:256].view(16, 16)
    given = QuantizedTensor(qdata, memory["scale"][start["scale"]], "tensorwise")
    aligned = aligned_operand(given)
    assert getattr(given, part).storage_offset() == 1
    assert getattr(aligned, part).storage_offset() == 0
    assert torch.equal(dequantize(aligned), dequantize(given))
