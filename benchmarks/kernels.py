"""The kernels of one call and the time that each takes, by torch's profiler."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.card import synchronize

COLUMNS = ("kernel", "calls", "ms", "share")
SHOWN = 20


def kernel_rows(run: Callable[[], object], device: torch.device) -> list[dict[str, object]]:
    """Return the kernels that take most of the GPU's time; on a CPU the operators.

    Args:
        run: one call, warm.
        device: where it runs.
    Returns:
        rows of COLUMNS, the slowest first, and a last one ``all`` with the sums.
    """
    with profiler(device) as recorded:
        run()
        synchronize(device)
    return rows_of(recorded, device)


def profiler(device: torch.device) -> profile:
    """Return a profiler of kernels, on a CPU of operators."""
    return profile(activities=[getattr(ProfilerActivity, device.type.upper())])


def rows_of(recorded: profile, device: torch.device) -> list[dict[str, object]]:
    """Return the rows of a profile; see `kernel_rows`."""
    on_gpu, found = device.type == "cuda", []
    for event in recorded.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds > 0:
            found.append((event.key[:120], event.count, microseconds / 1e3))
    found.sort(key=lambda kernel: -kernel[2])
    total = sum(ms for _, _, ms in found)
    entries = [*found[:SHOWN], ("all", sum(calls for _, calls, _ in found), total)]
    return [
        dict(zip(COLUMNS, (key, calls, round(ms, 4), round(ms / max(total, 1e-9), 4)), strict=True))
        for key, calls, ms in entries
    ]
