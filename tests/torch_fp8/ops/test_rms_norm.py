import pytest
import torch

from tests.internals import E4M3, CastOptions, NormBackwardInputs, NormInputs, NormWithRstd, sqnr_db
from torch_fp8.ops import rms_norm as ops
from torch_fp8.ops.quantize import QuantizedTensor, dequantize

BF16 = torch.bfloat16
EPS = 1e-5


def inputs(rows, cols, dtype=BF16):
    x = torch.randn(rows, cols) * 2.0 ** torch.randint(-8, 9, (rows, 1))
    return x.to(dtype), torch.rand(cols) + 0.5


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_norm_is_that_of_the_formula(dtype, offset):
    x, weight = inputs(37, 300, dtype)
    rstd, amax, *_ = ops.rms_norm_statistics(NormInputs(x, weight, EPS, offset, dtype), False)
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt()
    y = ops.rms_norm(NormWithRstd(x, weight, rstd, offset, dtype))
    torch.testing.assert_close(y, (exact * (weight + offset)).to(dtype))
    assert amax == y.abs().max()
    assert rstd.dtype == amax.dtype == torch.float32


def test_what_is_saved_is_the_input():
    x, weight = inputs(130, 300)
    *_, qdata, scale = ops.rms_norm_statistics(NormInputs(x, weight, EPS, 0.0, BF16), True)
    back = dequantize(QuantizedTensor(qdata, scale, "block_1x128"))
    assert sqnr_db(x.float(), back) > E4M3.cast_sqnr_db - 0.5
    assert torch.equal(scale, torch.exp2(scale.log2().round()))
    *_, qdata, scale = ops.rms_norm_statistics(NormInputs(x, weight, EPS, 0.0, BF16), False)
    assert qdata.shape == scale.shape == (0,)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_backward_is_the_derivative(offset):
    x, weight = inputs(20, 70, torch.float64)
    x, weight = x.requires_grad_(), weight.double().requires_grad_()
    grad = torch.randn(20, 70, dtype=torch.float64)
    rstd = (x.square().mean(1) + EPS).rsqrt()
    (x * rstd[:, None] * (weight + offset)).backward(grad)
    plain = [t.detach().float() for t in (grad, x, weight, rstd)]
    made = ops.rms_norm_backward(
        NormBackwardInputs(plain[0], plain[1], None, *plain[2:], offset, torch.float32, True)
    )
    torch.testing.assert_close(made[0], x.grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made[1], weight.grad.float(), rtol=1e-4, atol=1e-5)
    dx, dw = ops.rms_norm_backward(
        NormBackwardInputs(plain[0], plain[1], None, *plain[2:], offset, BF16, False)
    )
    assert torch.equal(dx, made[0].bfloat16())
    assert dw.shape == (0,)


def test_backward_of_what_was_saved():
    x, weight = inputs(64, 300)
    rstd, _, qdata, scale = ops.rms_norm_statistics(NormInputs(x, weight, EPS, 0.0, BF16), True)
    grad = torch.randn(64, 300).bfloat16()
    arguments = (weight, rstd, 0.0, torch.float32, True)
    saved = ops.rms_norm_backward(NormBackwardInputs(grad, qdata, scale, *arguments))
    back = dequantize(QuantizedTensor(qdata, scale, "block_1x128"))
    for a, b in zip(
        saved, ops.rms_norm_backward(NormBackwardInputs(grad, back, None, *arguments)), strict=True
    ):
        assert torch.equal(a, b)
    exact = ops.rms_norm_backward(NormBackwardInputs(grad, x, None, *arguments))
    # x enters dw directly, and dx through a projection only: far better than the cast itself.
    assert sqnr_db(exact[0], saved[0]) > E4M3.cast_sqnr_db + 10
    assert sqnr_db(exact[1], saved[1]) > E4M3.cast_sqnr_db - 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_row_that_is_not_finite_is_seen(bad):
    x, weight = inputs(40, 140)
    x[5, 7] = bad
    rstd, amax, qdata, scale = ops.rms_norm_statistics(NormInputs(x, weight, EPS, 0.0, BF16), True)
    assert amax.isnan()
    options = CastOptions(E4M3.dtype, "block_1x128", True, True, False)
    q, s, _, _ = ops.rms_norm_quantize(NormWithRstd(x, weight, rstd, 0.0, BF16), options)
    back = dequantize(QuantizedTensor(q, s, "block_1x128"))
    assert not back[5, 7].isfinite()
    assert back[6:].isfinite().all()
    dx, dw = ops.rms_norm_backward(
        NormBackwardInputs(x, qdata, scale, weight, rstd, 0.0, BF16, True)
    )
    assert not dx[5].isfinite().any()
    assert dx[6:].isfinite().all()
    assert not dw[7].isfinite()


def test_zero_rows_are_zero():
    x, weight = inputs(5, 140)
    x[2] = 0
    rstd = ops.rms_norm_statistics(NormInputs(x, weight, EPS, 0.0, BF16), False)[0]
    assert rstd[2] == torch.tensor(EPS).rsqrt()
    assert (ops.rms_norm(NormWithRstd(x, weight, rstd, 0.0, BF16))[2] == 0).all()
