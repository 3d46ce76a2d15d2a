import pytest
import torch

from tests.internals import E4M3, BackwardInputs, CastOptions, sqnr_db
from tests.kernel_cases.comparison import same_bits
from torch_fp8.ops import swiglu as ops
from torch_fp8.ops import swiglu_backward as backward
from torch_fp8.ops.quantize import QuantizedTensor, dequantize

BF16 = torch.bfloat16


def inputs(rows, cols, dtype=BF16):
    """gate, up, smooth: rows of every size, factors that are powers of two or not."""
    gate = torch.randn(rows, cols) * 2.0 ** torch.randint(-6, 5, (rows, 1))
    return gate.to(dtype), torch.randn(rows, cols).to(dtype), torch.rand(cols) + 0.25


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_product_is_that_of_the_formula(dtype, smooth):
    gate, up, factor = inputs(37, 300, dtype)
    factor = factor if smooth else None
    exact = torch.nn.functional.silu(gate.double()) * up.double() * (factor if smooth else 1)
    torch.testing.assert_close(ops.swiglu(gate, up, factor), exact.to(dtype))


def test_nothing_is_saved_that_is_not_wanted():
    gate, up, _ = inputs(37, 300)
    cast = CastOptions(E4M3.dtype, "block_1x128", True, True, True)
    *nothing, alone = ops.swiglu_save(gate, up, None, False)
    same_bits(alone, ops.swiglu_save(gate, up, None)[4])
    nothing += ops.swiglu_quantize(gate, up, None, cast, False)[4:]
    assert [t.shape for t in nothing] == [(0,)] * 8


def test_what_is_saved_is_the_input():
    gate, up, _ = inputs(130, 300)
    gate_q, gate_s, up_q, up_s, _ = ops.swiglu_save(gate, up, None)
    for x, qdata, scale in ((gate, gate_q, gate_s), (up, up_q, up_s)):
        back = dequantize(QuantizedTensor(qdata, scale, "block_1x128"))
        assert sqnr_db(x.float(), back) > E4M3.cast_sqnr_db - 0.5
        assert torch.equal(scale, torch.exp2(scale.log2().round()))


def test_backward_is_the_derivative():
    gate, up = (t.double().requires_grad_() for t in inputs(20, 70, torch.float32)[:2])
    grad = torch.randn(20, 70, dtype=torch.float64)
    (torch.nn.functional.silu(gate) * up).backward(grad)
    plain = [t.detach().float() for t in (grad, gate, up)]
    arguments = BackwardInputs(plain[0], plain[1], None, plain[2], None, torch.float32)
    made = backward.swiglu_backward(arguments)
    torch.testing.assert_close(made[0], gate.grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made[1], up.grad.float(), rtol=1e-4, atol=1e-5)
    rounded_ones = backward.swiglu_backward(arguments._replace(out_dtype=BF16))
    for rounded, exact in zip(rounded_ones, made, strict=True):
        assert torch.equal(rounded, exact.bfloat16())


def test_backward_of_what_was_saved():
    gate, up, _ = inputs(64, 300)
    parts = ops.swiglu_save(gate, up, None)[:4]
    saved = BackwardInputs(torch.randn(64, 300).bfloat16(), *parts, BF16)
    gate, up = (dequantize(QuantizedTensor(saved[i], saved[i + 1], "block_1x128")) for i in (1, 3))
    plain = saved._replace(gate=gate, gate_scale=None, up=up, up_scale=None)
    pairs = zip(backward.swiglu_backward(saved), backward.swiglu_backward(plain), strict=True)
    for a, b in pairs:
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("where", ["gate", "up"])
def test_an_element_that_is_not_finite_is_seen(where, bad):
    gate, up, _ = inputs(40, 140)
    {"gate": gate, "up": up}[where][5, 7] = bad
    *saved, amax = ops.swiglu_save(gate, up, None)
    assert not amax.isfinite()
    options = CastOptions(E4M3.dtype, "block_1x128", True, True, False)
    made = ops.swiglu_quantize(gate, up, None, options, False)
    back = dequantize(QuantizedTensor(made[0], made[1], "block_1x128"))
    assert not back[5, 7].isfinite()
    assert back[6:].isfinite().all()
    inputs_of_it = BackwardInputs(torch.ones_like(gate), *saved, BF16)
    gradients = backward.swiglu_backward(inputs_of_it)
    assert not (gradients[0][5, 7] + gradients[1][5, 7]).isfinite()


def test_large_gates_pass_and_small_ones_close():
    gate = torch.tensor([[1e4, -1e4, 0.0, 200.0, -200.0]])
    h = ops.swiglu(gate, torch.full_like(gate, 2.0), None)
    assert h.tolist() == [[2e4, 0.0, 0.0, 400.0, 0.0]]
    ones = torch.ones_like(gate)
    arguments = BackwardInputs(ones, gate, None, ones, None, torch.float32)
    dgate, dup = backward.swiglu_backward(arguments)
    assert dgate.tolist() == [[1.0, 0.0, 0.5, 1.0, 0.0]]
    assert dup.tolist() == [[1e4, 0.0, 0.0, 200.0, 0.0]]
