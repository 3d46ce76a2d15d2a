import pytest

from tests.kernel_cases import messages
from tests.kernel_cases.messages import DTYPES, KEYS, LAYOUTS
from torch_fp8.ops import messages as wire

pytestmark = pytest.mark.gpu
EXPONENTS = {"usual": 0, "tiny": -120, "huge": 120}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("exponent", EXPONENTS.values(), ids=EXPONENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("layout", "numel"), LAYOUTS, ids=str)
def test_messages_and_sums_equal_the_reference(layout, numel, dtype, exponent, keys):
    messages.check_messages(wire, "cuda", layout, numel, dtype, exponent, keys)
