import pytest

from tests.kernel_cases import played

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", played.SHAPES, ids=str)
def test_played_calls_make_and_write_the_same_bytes(shape):
    for call in played.calls(*shape, "cuda"):
        played.check_played(call)
