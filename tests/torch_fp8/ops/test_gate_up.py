import pytest
import torch

from tests.internals import E4M3, BackwardInputs, CastOptions
from torch_fp8.ops import swiglu
from torch_fp8.ops import swiglu_backward as ops

BF16 = torch.bfloat16


def inputs(shape, saved, gate_first=True):
    """What backward takes, without `gate_first`; gate and up are halves of one tensor."""
    rows, cols = shape
    both = torch.randn(rows, 2 * cols) * 2.0 ** torch.randint(-6, 5, (rows, 1))
    gate, up = ops.halves(both.to(BF16), gate_first)
    grad = torch.randn(shape).to(BF16)
    gate_s = up_s = None
    if saved:
        gate, gate_s, up, up_s, _ = swiglu.swiglu_save(gate, up, None)
    return BackwardInputs(grad, gate, gate_s, up, up_s, BF16)


def test_one_scale_is_that_of_the_larger_half():
    grad = torch.ones(4, 16)
    gate, up = torch.full((4, 16), 50.0), torch.full((4, 16), 0.5)
    arguments = BackwardInputs(grad, gate, None, up, None, torch.float32)
    assert ops.gate_up_backward_amax(arguments) == 50  # dup is silu(gate)
    options = CastOptions(E4M3.dtype, "tensorwise", False, True, False, amax=torch.tensor(50.0))
    q, s, _, _ = ops.gate_up_backward_quantize(arguments, True, options)
    assert torch.allclose(q.float() * s, torch.tensor([[0.5] * 16 + [50.0] * 16] * 4), rtol=0.04)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_an_element_that_is_not_finite_is_seen(bad):
    arguments = inputs((40, 128), True)
    arguments.grad[5, 7] = bad
    assert not ops.gate_up_backward_amax(arguments).isfinite()
    both = ops.gate_up_backward(arguments, True)
    assert not both[5, [7, 135]].isfinite().any()
    assert both[6:].isfinite().all()
