import pytest
import torch

from tests.internals import kernels_messages as wire
from torch_fp8.ops.messages import Layout

NUMEL = {"aligned": 3 * 100 * 32 - 48, "any": 3 * 100 * 32 - 7}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def launches_of(record_launches, dtype, numel):
    """Return 6 launches: those of each function of `ops.messages`."""
    layout, values = Layout(100, 9), torch.zeros(NUMEL[numel], dtype=DTYPES[dtype])
    messages = torch.zeros(3, layout.num_bytes, dtype=torch.uint8)
    out = torch.zeros(3200 + (numel == "any"), dtype=DTYPES[dtype])
    with record_launches(wire) as launches:
        wire.pack(values, layout, messages)
        for keys in (None, (16, 1)):
            wire.reduce_and_repack(messages, layout, messages[:1], 0.25, keys)
        wire.unpack(messages, layout, values)
        wire.unpack_sum(messages, layout, out[numel == "any" :], 0.25)
        wire.sum_plain(layout.plain(messages), out[:9], 1 / 3)
    return launches


@pytest.mark.long
@pytest.mark.parametrize("numel", NUMEL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_compiles_without_spills(dtype, numel, record_launches, compile_all):
    launches = launches_of(record_launches, dtype, numel)
    assert len(launches) == len({launch.key for launch in launches}) == 6
    # 8 programs of 4 warps in a multiprocessor: of 65536 registers, 64 for each thread.
    ptx_of_launches = compile_all(launches, registers=64, shared=8192)
    for launch, ptx in zip(launches, ptx_of_launches, strict=True):
        if "plain" not in launch.name:
            wide = numel == "aligned" or "repack" in launch.name
            values = launch.name.startswith("pack")
            assert f"ld.global.v{4 if values else 2}" in ptx or not wide
            codes = launch.name.startswith(("pack", "reduce"))
            assert f"st.global.v{2 if codes else 4}.b32" in ptx or not wide


def test_sizes_and_keys_are_no_constants(record_launches):
    """Or a kernel would be compiled again for each that happens to be a multiple of 16."""
    for launch in launches_of(record_launches, "fp32", "aligned"):
        assert not set(launch.divisible) - {n for n, kind in launch.signature if kind[0] == "*"}
        constants = {name for name, _ in launch.constants}
        assert constants <= {"STOCHASTIC", "ALIGNED", "GROUPS", "BLOCK"}
