"""The Triton GEMM: compiled without a card, and run where there is one."""

import itertools
import re

import pytest
import torch

from benchmarks import triton_gemm_kernel
from benchmarks.triton_gemm import TILES, blockwise_gemm
from tests.internals import E4M3, CastSpec, sqnr_db
from torch_fp8.ops.quantize import QuantizedTensor, quantize
from torch_fp8.ops.scaled_mm import scaled_matmul_reference

GRANULARITIES = ("block_128x128", "block_1x128")
SHARED_BYTES = 227 * 1024  # that one program may have, of Hopper's and Blackwell's multiprocessors


def operand(rows, contracted, granularity, dtype=torch.float8_e4m3fn):
    """Uninitialised."""
    blocks = -(-contracted // 128)
    if granularity == "block_1x128":
        scale = torch.empty(blocks, rows).t()
    else:
        scale = torch.empty(-(-rows // 128), blocks)
    return QuantizedTensor(torch.empty(rows, contracted, dtype=dtype), scale, granularity)


def launches_of(record_launches, shape, granularity, dtypes, *, tiles=TILES, bias=False):
    rows, cols, contracted = shape
    a = operand(rows, contracted, "block_1x128")
    b = operand(cols, contracted, granularity)
    with record_launches(triton_gemm_kernel) as launches:
        for dtype, tile in itertools.product(dtypes, tiles):
            blockwise_gemm(a, b, dtype, tile, torch.empty(cols, dtype=dtype) if bias else None)
    return launches


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_tile_compiles_without_spills(granularity, target, record_launches, compile_for):
    """For TMA and the tensor cores of FP8; odd sizes and float16 with a bias."""
    of = (record_launches, (4096, 14336, 4096), granularity, (torch.bfloat16, torch.float32))
    odd = (record_launches, (1001, 515, 1000), granularity, (torch.float16,))
    launches = [*launches_of(*of), *launches_of(*odd, bias=True)]
    assert len({launch.key for launch in launches}) == 3 * len(TILES)
    for launch in launches:
        ptx, used = compile_for(launch, target)
        print(f"{target} {launch.name}: {used}")
        assert used.stack == used.local == 0, f"{launch.name} spills: {used}"
        assert used.registers * launch.num_warps * 32 <= 65536
        assert used.shared <= SHARED_BYTES
        assert "cp.async.bulk.tensor.2d" in ptx
        if target == "sm_90":
            cols = dict(launch.constants)["TILE_S"]
            instruction = f"wgmma.mma_async.sync.aligned.m64n{cols}k32.f32.e4m3.e4m3"
            assert set(re.findall(r"wgmma\.mma_async\S+", ptx)) == {instruction}
        else:
            assert "tcgen05.mma.cta_group::1.kind::f8f6f4" in ptx


def test_the_tensor_cores_sum_of_a_block_begins_at_zero(record_launches, compile_for):
    """An instruction adds to its accumulator unless its operand after the descriptors is 0."""
    of = (record_launches, (4096, 4096, 4096), "block_128x128", (torch.bfloat16,))
    (launch,) = launches_of(*of, tiles=TILES[:1])
    ptx, _ = compile_for(launch, "sm_90")
    operands = re.findall(r"wgmma\.mma_async[^{]*\{[^}]*\}, %rd\d+, %rd\d+, (\S+),", ptx)
    assert len(operands) == 4  # 128 elements, 32 at a time
    assert operands.count("0") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(512, 384, 4096), (37, 131, 515), (700, 272, 200)], ids=str)
def test_on_a_card_it_is_the_references(shape, granularity, tile):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("TMA comes with sm_90")
    rows, cols, contracted = shape
    spec = CastSpec(E4M3, "block_1x128")
    a = quantize(torch.randn(rows, contracted, device="cuda"), spec)
    b = quantize(torch.randn(cols, contracted, device="cuda"), CastSpec(E4M3, granularity))
    bias = torch.randn(cols, device="cuda")
    got = blockwise_gemm(a, b, torch.float32, tile, bias)
    assert torch.equal(got, blockwise_gemm(a, b, torch.float32, tile, bias))
    assert sqnr_db(scaled_matmul_reference(a, b, torch.float32, bias), got) >= 50
