import pytest
import torch

from tests.internals import RECIPES, CastOptions, make_recipe, multiple_of_16, new_group_scales
from torch_fp8.ops import gemm_operand
from torch_fp8.ops.gemm_operand import operand
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize, quantize_layouts
from torch_fp8.ops.scaled_mm import scaled_matmul

K, N = 128, 256


def _with_room(x):
    """As kernels return a payload of 1x128 blocks: whole multiples of 16 rows lie in memory."""
    rows, cols = x.qdata.shape
    qdata = torch.full((multiple_of_16(rows), cols), 0x7F, dtype=torch.uint8)  # NaN behind it
    qdata[:rows] = x.qdata.view(torch.uint8)
    return x._replace(qdata=qdata.view(x.qdata.dtype)[:rows])


def _pads(x, rows, cols, value):
    assert rows == cols == 0, f"a copy of {tuple(x.shape)}"
    return x


@pytest.mark.parametrize("tokens", [1, 37, 133, 4095])
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_no_operand_of_a_layer_is_padded_by_a_copy(monkeypatch, recipe_name, tokens):
    recipe = make_recipe(recipe_name)
    x, w, g = torch.randn(tokens, K), torch.randn(N, K), torch.randn(tokens, N)
    x_row, x_col = quantize_layouts(x, CastOptions.of(recipe.input, rowwise=True, columnwise=True))
    w_row, w_col = quantize_layouts(w, CastOptions.of(recipe.weight, rowwise=True, columnwise=True))
    g_row, g_col = quantize_layouts(
        g, CastOptions.of(recipe.grad_output, rowwise=True, columnwise=True)
    )
    if recipe_name == "blockwise":
        x_row, g_row = _with_room(x_row), _with_room(g_row)
    if recipe_name in ("blockwise", "mxfp8"):  # a few bytes of scales are laid out anew
        monkeypatch.setitem(gemm_operand._LAY_OUT, "block_128x128", lambda scale: scale)
        monkeypatch.setitem(gemm_operand._LAY_OUT, "block_1x32", lambda scale: scale)
    monkeypatch.setattr(gemm_operand, "_pad", _pads)
    for a, b, contracted in ((x_row, w_row, K), (g_row, w_col, N), (g_col, x_col, tokens)):
        made = operand(a, contracted, is_b=False), operand(b, contracted, is_b=True)
        assert made[0].qdata.shape[1] == made[1].qdata.shape[1]
        assert all(q.qdata.shape[1] % 16 == 0 for q in made)


def test_what_lies_behind_the_rows_is_used_only_where_it_lies_there():
    spec = make_recipe("blockwise").input
    x, _ = quantize_layouts(
        torch.randn(37, K), CastOptions.of(spec, rowwise=True, columnwise=False)
    )
    assert gemm_operand._with_rows_behind(x, 48) is None  # 37 rows in memory
    found = gemm_operand._with_rows_behind(_with_room(x), 48)
    assert found.qdata.shape == (48, K)
    assert found.scale.shape == (48, 1)
    assert found.scale.stride() == (1, 48)
    assert torch.equal(found.qdata[:37].float(), x.qdata.float())
    dense = x._replace(scale=torch.ones(1, 37).t())  # no room for more
    assert gemm_operand._with_rows_behind(_with_room(dense), 48) is None
    assert operand(x, K, is_b=False).qdata.shape == (48, K)  # by a copy then


def test_scales_of_32_elements_are_laid_out_with_what_lies_behind_them(monkeypatch):
    spec = make_recipe("mxfp8").input
    x = quantize(torch.randn(133, K), spec)
    filled_up = gemm_operand._swizzled_e8m0(x.scale)  # 133 rows in memory
    room = new_group_scales(x.scale, 133, K, 32)
    assert room.stride() == (4, 1)
    room.as_strided((256, 4), (4, 1)).fill_(float("nan"))
    room.copy_(x.scale)

    monkeypatch.setattr(gemm_operand, "_pad", _pads)
    made = operand(x._replace(scale=room), K, is_b=False)
    # A tile of 128 rows is 512 bytes; of the second one, 5 rows exist, 16 bytes apart.
    assert made.scale.shape == filled_up.shape == (1024,)
    got, want = made.scale.view(torch.uint8), filled_up.view(torch.uint8)
    exist = torch.ones(1024, dtype=torch.bool)
    exist[512:] = False
    for row in range(5):
        exist[512 + 16 * row : 512 + 16 * row + 4] = True
    assert torch.equal(got[exist], want[exist])
    assert not want[~exist].any()


@pytest.mark.parametrize("tokens", [1, 37, 144])
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_padding_changes_no_bit_of_a_weight_gradient(recipe_name, tokens):
    recipe = make_recipe(recipe_name)
    x, g = torch.randn(tokens, K), torch.randn(tokens, N)
    _, x_col = quantize_layouts(x, CastOptions.of(recipe.input, rowwise=False, columnwise=True))
    _, g_col = quantize_layouts(
        g, CastOptions.of(recipe.grad_output, rowwise=False, columnwise=True)
    )
    got = scaled_matmul(g_col, x_col, torch.float32, tokens)
    bare = [QuantizedTensor(q.qdata[:, :tokens].contiguous(), *q[1:]) for q in (g_col, x_col)]
    assert torch.equal(got, scaled_matmul(*bare, torch.float32))
    assert not dequantize(x_col)[:, tokens:].any()


def test_operands_of_which_one_alone_is_padded():
    recipe = make_recipe("rowwise")
    a, b = torch.randn(24, 20), torch.randn(40, 20)
    _, padded = quantize_layouts(
        a.t(), CastOptions.of(recipe.input, rowwise=False, columnwise=True)
    )
    row, _ = quantize_layouts(b, CastOptions.of(recipe.weight, rowwise=True, columnwise=False))
    assert padded.qdata.shape == (24, 32)
    made = scaled_matmul(padded, row, torch.float32)
    want = dequantize(padded)[:, :20] @ dequantize(row).t()
    torch.testing.assert_close(made, want)
    a, b = operand(padded, 20, is_b=False), operand(row, 20, is_b=True)
    assert a.qdata.shape == (24, 32)
    assert b.qdata.shape == (48, 32)
