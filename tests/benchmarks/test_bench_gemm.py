"""The contenders of the GEMM benchmark."""

import pytest
import torch

from benchmarks import bench_gemm
from benchmarks.roofline import Rates
from benchmarks.triton_gemm import TILES
from torch_fp8.ops.scaled_mm import scaled_matmul_reference
from torch_fp8.quantization.recipe import GEMMS

CPU = torch.device("cpu")
BY_TRITON = {f"blockwise, Triton {tile}": tile for tile in TILES}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_card_triton_has_a_reason_and_no_time():
    rows = bench_gemm.gemm_rows("fprop", 32, 48, 16, Rates(1e12, 2e12, 1e12), CPU)
    found = {row["variant"]: row for row in rows}
    assert set(BY_TRITON) < set(found)
    for name, row in found.items():
        assert ("median_ms" in row) == (name not in BY_TRITON)
        assert ("sm_90" in row["note"]) == (name in BY_TRITON)


@pytest.mark.parametrize("gemm", GEMMS)
def test_every_tile_gets_the_operands_of_blockwise(monkeypatch, gemm):
    """And its error and time come from what it returns."""
    calls = []

    def multiplied(a, b, out_dtype, tile):
        calls.append((a.granularity, b.granularity, out_dtype, tile))
        return scaled_matmul_reference(a, b, out_dtype)

    monkeypatch.setattr(bench_gemm, "runs_triton_gemm", lambda device: True)
    monkeypatch.setattr(bench_gemm, "blockwise_gemm", multiplied)
    rows = bench_gemm.gemm_rows(gemm, 32, 48, 16, Rates(1e12, 2e12, 1e12), CPU)
    found = {row["variant"]: row for row in rows}
    assert all(found[name]["median_ms"] > 0 for name in BY_TRITON)
    assert all(found[name]["error"] == found["blockwise"]["error"] for name in BY_TRITON)
    square = "block_1x128" if gemm == "wgrad" else "block_128x128"
    assert set(calls) == {
        ("block_1x128", square, dtype, tile)
        for dtype in (torch.float32, torch.bfloat16)
        for tile in TILES
    }
