import pytest
import torch

from tests.internals import GateBackwardInputs, sqnr_db
from tests.kernel_cases.experts import EXPERTS, FORMS
from torch_fp8.ops.expert_gate import (
    activation,
    expert_gate_backward,
    expert_gate_quantize,
    join_gate,
    split_gate,
)
from torch_fp8.ops.moe_rows import group_of_rows
from torch_fp8.ops.quantize import QuantizedTensor, dequantize

CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ROWS, WIDTH = 96, 160
EACH_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def inputs(bias=True):
    offs = torch.tensor([16, 16, 64, 80, 96], dtype=torch.int32)
    h = torch.randn(ROWS, 2 * WIDTH, dtype=torch.bfloat16) * 4
    return h, torch.rand(ROWS), offs, torch.randn(EXPERTS, 2 * WIDTH) if bias else None


def exact(h, score, offs, bias, form):
    """The activation times the score, float32, and the leaves of its gradients."""
    h = h.float() if bias is None else (h.float() + bias[group_of_rows(offs, ROWS)]).bfloat16()
    h, score = h.float().requires_grad_(), score.clone().requires_grad_()
    return activation(*split_gate(h, form), form) * score[:, None], h, score


@EACH_FORM
@pytest.mark.parametrize("bias", [False, True])
def test_payload_and_gradients_have_the_bits_of_their_casts(form, bias):
    """One cast: 31.5 dB. Backward takes gate and up in E4M3, so that a and the gradients have
    three of them: 26.5 dB.
    """
    args = inputs(bias)
    a, h, score = exact(*args, form)
    q, s, *saved = expert_gate_quantize(*args, form, True)
    assert sqnr_db(a, dequantize(QuantizedTensor(q, s, "rowwise"))) >= 31
    grad = torch.randn(ROWS, WIDTH).bfloat16()
    dh, dscore = torch.autograd.grad(a, (h, score), grad.float())
    tensors = GateBackwardInputs(grad, args[1], *saved)
    a_q, a_s, dh_q, dh_s, dscore_8 = expert_gate_backward(tensors, form)
    assert sqnr_db(a, dequantize(QuantizedTensor(a_q, a_s, "rowwise"))) >= 26
    assert sqnr_db(dh, dequantize(QuantizedTensor(dh_q, dh_s, "rowwise"))) >= 25.5
    assert sqnr_db(dscore, dscore_8) >= 26


@EACH_FORM
def test_what_the_limits_cut_gets_no_gradient(form):
    h, score, offs, _ = inputs(False)
    *_, gate_q, gate_s, up_q, up_s = expert_gate_quantize(h, score, offs, None, form, True)
    grad = torch.ones(ROWS, WIDTH)
    tensors = GateBackwardInputs(grad, score, gate_q, gate_s, up_q, up_s)
    dh_q = expert_gate_backward(tensors, form)[2]
    dgate, dup = split_gate(dh_q.float(), form)
    gate = dequantize(QuantizedTensor(gate_q, gate_s, "block_1x128"))
    up = dequantize(QuantizedTensor(up_q, up_s, "block_1x128"))
    assert (gate > 7).any()
    assert bool(dgate[gate > 7].any()) == (not form.clamped)
    assert bool(dup[up.abs() > 7].any()) == (not form.clamped)


@EACH_FORM
def test_gate_and_up_come_apart_as_they_were_joined(form):
    gate, up = torch.randn(2, 5, 7)
    parts = split_gate(join_gate(gate, up, form), form)
    assert all(torch.equal(a, b) for a, b in zip(parts, (gate, up), strict=True))


@EACH_FORM
def test_nan_stays_in_its_row(form):
    h, score, offs, bias = inputs()
    h[7, 3] = float("nan")
    q, s, *saved = expert_gate_quantize(h, score, offs, bias, form, True)
    tensors = GateBackwardInputs(torch.ones(ROWS, WIDTH), score, *saved)
    results = expert_gate_backward(tensors, form)
    rest = torch.arange(ROWS) != 7
    for x in (q, s, *results):
        assert x.float()[rest].isfinite().all()
        assert not x.float()[7].isfinite().all()


@EACH_FORM
@pytest.mark.parametrize("save", [False, True])
def test_operators_keep_the_contract_of_torch_library(form, save):
    args, ops = inputs(), torch.ops.torch_fp8
    operator = ops.expert_gate_quantize.default
    torch.library.opcheck(operator, (*args, *form, save), test_utils=CHECKS)
    saved = expert_gate_quantize(*args, form, True)[2:]
    given = (torch.randn(ROWS, WIDTH), args[1], *saved, *form)
    torch.library.opcheck(ops.expert_gate_backward.default, given, test_utils=CHECKS)
