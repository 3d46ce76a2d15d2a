import pytest

from tests.kernel_cases import messages
from tests.kernel_cases.messages import DTYPES, SHAPES
from torch_fp8.ops import grad_codec

pytestmark = pytest.mark.gpu
EXPONENTS = {"usual": 0, "tiny": -120, "huge": 120}


@pytest.mark.parametrize("exponent", EXPONENTS.values(), ids=EXPONENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_equal_the_reference(shape, dtype, exponent):
    messages.check_gradient(grad_codec, "cuda", shape, dtype, exponent)
