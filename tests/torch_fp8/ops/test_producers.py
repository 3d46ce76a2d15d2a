"""RMSNorm and SwiGLU with their casts on the CPU: what the kernels' cases require of a device."""

import pytest

from tests.kernel_cases import producers
from tests.kernel_cases.casts import GRANULARITIES
from tests.kernel_cases.producers import OPS

SHAPES = ((37, 300), (1, 1), (129, 127), (130, 256), (0, 48), (48, 0))
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


@EACH_SHAPE
def test_casts_of_a_norm(shape):
    producers.check_norm(OPS, "cpu", shape, "gaussian")
    producers.check_norm_once(OPS, "cpu", shape, "tensorwise", finds_amax=True)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_norm_and_its_casts_at_once(granularity):
    producers.check_norm_once(OPS, "cpu", (150, 260), granularity)


@EACH_SHAPE
@pytest.mark.parametrize("smooth", [False, True])
def test_casts_of_a_product(shape, smooth):
    producers.check_swiglu(OPS, "cpu", shape, "gaussian", smooth)


@EACH_SHAPE
@pytest.mark.parametrize("saved", [False, True])
def test_casts_of_gradients(shape, saved):
    producers.check_swiglu_backward(OPS, "cpu", shape, saved)


@EACH_SHAPE
@pytest.mark.parametrize("gate_first", [True, False])
def test_casts_of_one_gradient_of_gate_and_up(shape, gate_first):
    producers.check_gate_up(OPS, "cpu", shape, gate_first)


@pytest.mark.parametrize("kind", ["gaussian", "nan"])
@EACH_SHAPE
def test_casts_of_smoothed_channels(shape, kind):
    producers.check_smoothing(OPS, "cpu", shape, kind)
