"""Measured rates of the card at hand: its copy bandwidth and its BF16 rate."""

import gc
from collections.abc import Callable

import torch

from benchmarks.measurement import interleaved
from benchmarks.roofline import Rates

COPY_BYTES = 2**30  # 17 times the largest L2 (60 MB on H200)
MATMUL_SIZE = 8192
REPETITIONS = 10


def measured_rates(device: torch.device, *, toy: bool = False) -> Rates:
    """Measure the medians of a copy and of a BF16 matrix product, interleaved; FP8 counts twice
    BF16.

    The product is of random numbers: zeros draw less power and run faster.

    Args:
        device: to measure.
        toy: sizes for a CPU.
    """
    rates = _rates(*((2**20, 256) if toy else (COPY_BYTES, MATMUL_SIZE)), device)
    free(device)
    return rates


def _rates(size: int, side: int, device: torch.device) -> Rates:
    copy, num_bytes = copying(size, device)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def matmul() -> None:
        torch.mm(a, b, out=out)

    timings = interleaved({"copy": copy, "matmul": matmul}, device, REPETITIONS)
    bf16 = 2 * side**3 / timings["matmul"].median * 1e3
    return Rates(num_bytes / timings["copy"].median * 1e3, bf16, 2 * bf16)


def copying(size: int, device: torch.device) -> tuple[Callable[[], None], int]:
    """Return a copy of `size` bytes on the device, and the bytes that it reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)

    return run, 2 * size


def free(device: torch.device) -> None:
    """Free unreferenced memory, so that the next variant has the card to
    itself; do nothing on the CPU.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for the GPU; do nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(run: Callable[[], None], device: torch.device) -> float:
    """Measure the peak memory of one call beyond what was there before, in MiB; 0 on the CPU."""
    if device.type != "cuda":
        run()
        return 0.0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
