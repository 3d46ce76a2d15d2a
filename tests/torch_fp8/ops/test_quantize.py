import math

import pytest
import torch

from tests.internals import (
    E4M3,
    E5M2,
    FORMATS,
    MIN_SCALE,
    CastOptions,
    CastSpec,
    make_recipe,
    padded_rows,
    sqnr_db,
)
from torch_fp8.ops.quantize import (
    cast_saturating,
    dequantize,
    quantize,
    quantize_2d,
    quantize_layouts,
    transposed,
)

GRANULARITIES = ("tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32")
FINE = ("rowwise", "blockwise", "mxfp8")


def _spec(granularity, format=E4M3):
    return CastSpec(format, granularity, power_of_two=granularity != "tensorwise")


@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_cast_reaches_the_floor_of_its_format(granularity, format):
    """Within 0.5 dB of the floor; one mantissa bit is 6 dB, so E5M2 cannot pass for E4M3."""
    x = torch.randn(256, 512)
    back = dequantize(quantize(x, _spec(granularity, format)))
    assert sqnr_db(x, back) == pytest.approx(format.cast_sqnr_db, abs=0.5)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 16), (129, 200), (0, 32), (32, 0)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_layouts_and_shapes(granularity, shape):
    rows, cols = shape
    x = torch.randn(rows, cols)
    row, col = quantize_layouts(
        x, CastOptions.of(_spec(granularity), rowwise=True, columnwise=True)
    )
    assert row.qdata.shape == (rows, cols)
    assert row.qdata.is_contiguous()
    assert col.qdata.shape == (cols, padded_rows(rows, granularity))
    assert col.qdata.is_contiguous()
    alone = quantize(x.t(), _spec(granularity))
    assert torch.equal(col.qdata[:, :rows].float(), alone.qdata.float())
    assert torch.equal(col.scale, alone.scale)
    assert not dequantize(col)[:, rows:].any()
    expected = {
        "tensorwise": (),
        "rowwise": (rows, 1),
        "block_1x128": (rows, -(-cols // 128)),
        "block_128x128": (-(-rows // 128), -(-cols // 128)),
        "block_1x32": (rows, -(-cols // 32)),
    }
    assert row.scale.shape == expected[granularity]
    assert row.scale.dtype == torch.float32
    assert dequantize(row).shape == (rows, cols)


def test_rows_are_padded_to_what_a_gemm_contracts_over():
    padded = {g: [padded_rows(n, g) for n in (0, 1, 16, 4095, 4112)] for g in GRANULARITIES}
    of_16 = [0, 16, 16, 4096, 4112]
    assert padded["block_1x128"] == [0, 128, 128, 4096, 4224]
    assert padded["block_128x128"] == [0, 1, 16, 4095, 4112]
    assert all(padded[g] == of_16 for g in ("tensorwise", "rowwise", "block_1x32"))


@pytest.mark.parametrize("granularity", ["tensorwise", "block_128x128"])
def test_square_granularities_commute_with_the_transpose(granularity):
    row, col = quantize_layouts(
        torch.randn(150, 260), CastOptions.of(_spec(granularity), rowwise=True, columnwise=True)
    )
    assert torch.equal(dequantize(row).t(), dequantize(col)[:, :150])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_strides_do_not_matter(granularity):
    base = torch.randn(64, 2, 96)
    for x in (base[:, 1], base[:, 0].t(), base[::2, 0, ::3]):
        strided, plain = (
            quantize(x, _spec(granularity)),
            quantize(x.contiguous(), _spec(granularity)),
        )
        assert torch.equal(dequantize(strided), dequantize(plain))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_are_exact_and_have_scale_one(granularity):
    q = quantize(torch.zeros(40, 140), _spec(granularity))
    assert (q.scale == 1).all()
    assert (dequantize(q) == 0).all()
    x = torch.randn(40, 140)
    x[::2] = 0
    assert (dequantize(quantize(x, _spec(granularity)))[::2] == 0).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_denormals_stay_finite_and_are_not_enlarged(granularity):
    x = torch.randn(32, 128) * 1e-41
    q = quantize(x, _spec(granularity))
    assert (q.scale >= MIN_SCALE).all()
    assert dequantize(q).isfinite().all()
    assert dequantize(q).abs().max() <= 2 * x.abs().max()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
def test_nonfinite_elements_stay_visible(granularity, format, bad):
    x = torch.randn(40, 140)
    x[5, 7] = bad
    back = dequantize(quantize(x, _spec(granularity, format)))
    assert not back[5, 7].isfinite()


def test_a_nonfinite_element_spoils_its_own_block_only():
    x = torch.randn(4, 256)
    x[1, 130] = math.inf
    back = dequantize(quantize(x, _spec("block_1x128")))
    assert back[1, 128:].isnan().all()
    back[1, 128:] = 0
    assert back.isfinite().all()


def test_a_given_scale_saturates_finite_values_and_shows_infinite_ones():
    one = torch.ones(())
    x = torch.tensor([1e9, -1e9, math.inf, -math.inf, math.nan, 460.0])
    e4m3 = cast_saturating(x, one, E4M3).float()
    assert e4m3[[0, 1, 5]].tolist() == [448, -448, 448]
    assert e4m3[2:5].isnan().all()
    e5m2 = cast_saturating(x, one, E5M2).float()
    assert e5m2[:4].tolist() == [57344, -57344, math.inf, -math.inf]
    assert e5m2[4].isnan()


def test_finite_overflow_of_the_quotient_saturates():
    q = cast_saturating(torch.tensor([1e30]), torch.tensor(1e-30), E5M2)
    assert q.float().item() == 57344


def test_rounding_is_to_nearest_even():
    x = torch.tensor([1.0625, 1.1875, 17.0, 19.0])  # ties in E4M3
    assert cast_saturating(x, torch.ones(()), E4M3).float().tolist() == [1.0, 1.25, 16.0, 20.0]


@pytest.mark.parametrize("granularity", ["block_1x32", "block_1x128", "block_128x128", "rowwise"])
def test_power_of_two_scales_round_up(granularity):
    """A block maximum of 500 needs scale 2 in E4M3: rounding down would clip it to 448."""
    x = torch.zeros(128, 128)
    x[0, 0] = 500.0
    q = quantize(x, _spec(granularity))
    assert q.scale.flatten()[0] == 2
    assert dequantize(q)[0, 0] == pytest.approx(500, rel=0.0323)


@pytest.mark.parametrize("granularity", GRANULARITIES[1:])
def test_requantizing_is_the_identity(granularity):
    """Power-of-two scales: what was quantized once survives a second cast bit for bit."""
    x = torch.randn(64, 300) * torch.rand(64, 1).exp()
    once = dequantize(quantize(x, _spec(granularity)))
    assert torch.equal(dequantize(quantize(once, _spec(granularity))), once)


def test_half_precision_inputs_are_cast_from_their_own_values():
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(33, 65).to(dtype)
        assert torch.equal(
            dequantize(quantize(x, _spec("rowwise"))),
            dequantize(quantize(x.float(), _spec("rowwise"))),
        )


@pytest.mark.parametrize("layouts", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_operator_is_its_reference(granularity, layouts):
    for scale in (None, torch.tensor(0.01)) if granularity == "tensorwise" else (None,):
        x, options = (
            torch.randn(20, 40),
            CastOptions(E4M3.dtype, granularity, False, *layouts, scale),
        )
        made = torch.ops.torch_fp8.quantize_2d(x, *options)
        expected = quantize_2d.reference(x, options)
        for a, b in zip(made, expected, strict=True):
            if b is None:
                assert a.shape == (0,)
            else:
                assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("shape", [(128, 640), (640, 256), (384, 896)])
def test_the_transpose_of_a_grid_that_is_no_square_has_the_same_values(shape):
    """A grid of scales that is reshaped instead has the right shape and other values."""
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[1])
    row = quantize(x, make_recipe("blockwise").weight)
    turned = transposed(row)
    rows, columns = shape
    assert torch.equal(dequantize(turned)[:columns, :rows], dequantize(row)[:rows, :columns].t())
