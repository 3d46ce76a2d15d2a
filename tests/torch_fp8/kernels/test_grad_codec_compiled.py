import pytest
import torch

from tests.internals import GradientParts, num_groups
from tests.internals import kernels_grad_codec as grad_codec

COLS = {"flat": 64, "rows": 48, "any": 33}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def launches_of(record_launches, dtype, layout):
    """Return the launches that quantize, accumulate and dequantize."""
    x = torch.zeros(200, COLS[layout], dtype=DTYPES[dtype])
    with record_launches(grad_codec) as launches:
        qdata = torch.empty(x.shape, dtype=torch.uint8)
        scale = torch.empty(200, num_groups(COLS[layout]), dtype=torch.uint8)
        parts = GradientParts(qdata, scale, torch.ones(()))
        grad_codec.encode_gradient(x, parts, (16, 1), False)
        grad_codec.encode_gradient(x, parts, (7, 8), True)
        grad_codec.dequantize_gradient(parts, DTYPES[dtype])
    return launches


@pytest.mark.long
@pytest.mark.parametrize("layout", COLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_compiles_without_spills(dtype, layout, record_launches, compile_all):
    launches = launches_of(record_launches, dtype, layout)
    assert len(launches) == 3
    # 8 programs of 4 warps in a multiprocessor: of 65536 registers, 64 for each thread.
    encoding, adding, decoding = compile_all(launches, registers=64, shared=8192)
    for ptx in (encoding, adding, decoding):
        assert ("ld.global.v4.b32" in ptx) is (layout != "any")
    # Eight elements to a thread: whole sectors of values, and of codes.
    assert ("st.global.v4.b32" in decoding) is (layout != "any")
    for ptx in (encoding, adding):
        assert ("st.global.v2.b32" in ptx) is (layout != "any")


def test_sizes_and_keys_are_no_constants(record_launches):
    """Or a kernel would be compiled again for each key that happens to be a multiple of 16."""
    for launch in launches_of(record_launches, "fp32", "flat"):
        numbers = {name for name, kind in launch.signature if kind == "i32"}
        free = {"num_groups", "cols"}
        free |= {"key0", "key1"} if "encode" in launch.name else set()
        assert numbers == free
        assert not numbers & set(launch.divisible)
