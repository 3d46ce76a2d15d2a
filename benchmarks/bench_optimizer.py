"""One optimizer step on a billion parameters: 8-bit AdamW against torch's fused one in FP32.

    python benchmarks/bench_optimizer.py         # on a GPU; benchmarks/results/optimizer.csv
    python benchmarks/bench_optimizer.py --toy   # a tiny model, also on a CPU: the reference path

The parameters of a TinyLlama-1.1B layout with tied embeddings: 200 tensors, 1.03e9 elements. All
variants step in this process, interleaved, with gradients that are there already. Before each call
the GPU is given something to wait on, so that `median_ms` is the GPU's time; `host_ms` is the
host's, which a training loop hides behind the backward pass or does not.

`bytes` are counted from the tensors: weights and states read and written, gradients read, once
each, also where update clipping reads gradients and second moments before. Takes 60 GB of memory.
`copy_share` is their rate over the card's copy bandwidth, measured between the steps; `speedup` is
over torch's fused AdamW.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measurement import (
    ENVIRONMENT,
    RESULTS,
    default_device,
    environment,
    interleaved,
    print_table,
    write_rows,
)
from shapes import TINY_LLAMA_1_1B, TOY_LLAMA, parameter_shapes
from torch import Tensor, nn

from torch_fp8 import FP8Config, convert_optimizer
from torch_fp8.gradients import Float8Grad
from torch_fp8.optimizer_state import is_large

COLUMNS = (
    "variant",
    "tensors",
    "parameters",
    "median_ms",
    "p20_ms",
    "p80_ms",
    "host_ms",
    "bytes",
    "bytes_per_parameter",
    "gb_per_s",
    "copy_share",
    "speedup",
    "note",
    *ENVIRONMENT,
)
FUSED = "torch AdamW, fp32"
COPY = "copy"
# Name -> (residual bits, update clipping, 8-bit gradients).
VARIANTS = {
    "fp8, 8 residual bits": (8, False, False),
    "fp8, 4 residual bits": (4, False, False),
    "fp8, no residual": (0, False, False),
    "fp8, 8 residual bits, 8-bit gradients": (8, False, True),
    "fp8, 8 residual bits, update clipping": (8, True, False),
}
COPY_BYTES = 4 * 2**30
WAIT_MS = 30.0  # longer than the host takes for any step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a tiny model")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--csv", type=Path, default=RESULTS / "optimizer.csv")
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.repetitions = 2
    device = default_device()
    rows = measure(arguments, device)
    about = environment(device)
    write_rows(arguments.csv, COLUMNS, [row | about for row in rows])
    print_table(("variant", "median_ms", "host_ms", "gb_per_s", "copy_share", "speedup"), rows)


def measure(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, object]]:
    """A row per variant, and one of the copy."""
    start = time.monotonic()
    shapes = parameter_shapes(**(TOY_LLAMA if arguments.toy else TINY_LLAMA_1_1B))
    runs: dict[str, Callable[[], None]] = {}
    num_bytes: dict[str, int] = {}
    host_ms: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    for name in (FUSED, *VARIANTS):
        try:
            optimizer = build(name, shapes, device)
            optimizer.step()  # compiles, and makes the states
        except Exception as error:  # whatever cannot run here becomes its row's note
            notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            continue
        runs[name] = timed_on_host(optimizer.step, host_ms.setdefault(name, []))
        num_bytes[name] = moved_bytes(optimizer)
    runs[COPY], num_bytes[COPY] = copy(2**20 if arguments.toy else COPY_BYTES, device)
    if time.monotonic() - start > arguments.budget:
        return [{"variant": FUSED, "note": "not reached within the budget"}]
    wait = 0.0 if arguments.toy else WAIT_MS
    timings = interleaved(runs, device, arguments.repetitions, wait_ms=wait)
    rate = {name: num_bytes[name] / timing.median / 1e6 for name, timing in timings.items()}
    parameters = sum(torch.Size(shape).numel() for shape in shapes)
    rows: list[dict[str, object]] = []
    for name in (FUSED, *VARIANTS, COPY):
        row: dict[str, object] = {"variant": name, "note": notes.get(name, "")}
        if name in timings:
            timing = timings[name]
            row |= {
                "median_ms": round(timing.median, 4),
                "p20_ms": round(timing.p20, 4),
                "p80_ms": round(timing.p80, 4),
                "bytes": num_bytes[name],
                "gb_per_s": round(rate[name], 1),
                "copy_share": round(rate[name] / rate[COPY], 3),
            }
        if name in timings and name != COPY:
            row |= {
                "tensors": len(shapes),
                "parameters": parameters,
                "host_ms": round(statistics.median(host_ms[name]), 4),
                "bytes_per_parameter": round(num_bytes[name] / parameters, 3),
                "speedup": round(timings[FUSED].median / timings[name].median, 3)
                if FUSED in timings
                else "",
            }
        rows.append(row)
    return rows


def build(name: str, shapes: list[tuple[int, ...]], device: torch.device) -> torch.optim.Optimizer:
    """An optimizer whose parameters have gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...], size: float) -> Tensor:
        return torch.randn(shape, generator=generator, device=device) * size

    parameters = [nn.Parameter(random(shape, 0.02)) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=name == FUSED)
    if name == FUSED:
        for parameter in parameters:
            parameter.grad = random(parameter.shape, 1e-3)
        return optimizer
    residual_bits, clipping, small_gradients = VARIANTS[name]
    config = FP8Config(opt_level="O2", residual_bits=residual_bits, update_clipping=clipping)
    convert_optimizer(optimizer, config)
    for parameter in parameters:
        grad = random(parameter.shape, 1e-3).to(parameter.dtype)
        quantized = small_gradients and is_large(parameter)
        parameter.grad = Float8Grad.quantize(grad) if quantized else grad
    return optimizer


def moved_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What a step has to read and write."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            states = [s for s in optimizer.state[parameter].values() if s.ndim]
            grad = parameter.grad
            parts = grad.parts() if isinstance(grad, Float8Grad) else [grad]
            total += sum(2 * tensor.nbytes for tensor in (parameter, *states))
            total += sum(part.nbytes for part in parts)
    return total


def timed_on_host(run: Callable[[], object], milliseconds: list[float]) -> Callable[[], None]:
    """`run`, noting how long the host takes for each call."""

    def timed() -> None:
        began = time.perf_counter()
        run()
        milliseconds.append((time.perf_counter() - began) * 1e3)

    return timed


def copy(size: int, device: torch.device) -> tuple[Callable[[], None], int]:
    """A copy on the device, and the bytes that it reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)

    return run, 2 * size


if __name__ == "__main__":
    main()
