"""What compiled kernels ask of a card, counted in the emulator of their PTX, and whether they are
equal to their references.

    python -m benchmarks.emulated_kernels    # benchmarks/results/emulated_kernels.csv

The cases of the GPU tests run on CPU tensors of small shapes, with tails and odd sizes, compiled
for Hopper and Blackwell; Triton's launcher launches and `tests.emulator` runs them. A row is a
kernel, its compile-time choices and the case that launched it. Cases that are in the file with this
version of Triton and the digest of this code are not run again. Nothing is timed:

* ``instructions_per_element``: of all threads, over the elements of the largest tensor;
* ``requested_over_needed``: bytes that threads load and store, over the different ones among them;
* ``sectors_over_least``: of 32 bytes, over as many as the bytes of each request of a warp fill;
* ``passes_over_least``: over the banks of shared memory, one is without conflicts;
* ``registers``: of a thread, as `benchmarks.kernel_resources` has recorded them.
"""

import argparse
import csv
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import torch_fp8.ops.grad_codec
from benchmarks import kernel_resources
from tests.emulator.counts import Counts
from tests.emulator.driver import Launched, emulated
from tests.emulator.families import ODD, WHOLE, card_module, families, operators
from tests.kernel_cases import casts, messages, optimizer, producers
from tests.kernel_cases.comparison import Mismatch

RESULTS = kernel_resources.RESULTS.with_name("emulated_kernels.csv")
TARGETS = {"sm_90": (9, 0), "sm_100": (10, 0)}
COLUMNS = (
    *("case", "kernel", "variant", "target", "warps", "equal", "launches"),
    *("instructions_per_element", "requested_over_needed", "sectors_over_least"),
    *("passes_over_least", "shared_bytes", "registers", "triton", "digest"),
)
SHAPES = (ODD, WHOLE)
_MATRICES = ((100, 128), (64, 272), (5, 48), (36, 33), (3, 7))


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the cases by name."""
    yield from families().items()
    for granularity in casts.GRANULARITIES:
        check = partial(casts.check_cast, casts.kernel(), "cpu", granularity)
        yield f"all casts, {granularity}", partial(check, "range", (*SHAPES, (129, 4096)))
        yield (
            f"strides, {granularity}",
            partial(casts.check_strides, casts.kernel(), "cpu", granularity),
        )
    check_delayed = partial(casts.check_delayed, casts.delayed_kernel(), "cpu", "row spread")
    yield "all delayed casts", partial(check_delayed, ((17, 272), ODD, WHOLE, (3, 20000)))
    ops = operators()
    for shape in (*SHAPES, (64, 512)):
        yield f"norm, {shape}", partial(producers.check_norm, ops, "cpu", shape, "gaussian")
        for granularity in ("block_1x128", "block_128x128", "block_1x32"):
            once = partial(producers.check_norm_once, ops, "cpu", shape, granularity)
            yield f"norm once, {granularity}, {shape}", once
        for flag in (False, True):
            backward = partial(producers.check_norm_backward, ops, "cpu", shape, flag)
            yield f"norm backward, {flag}, {shape}", backward
            swiglu = partial(producers.check_swiglu, ops, "cpu", shape, "gaussian", flag)
            yield f"swiglu, {flag}, {shape}", swiglu
            gate_up = partial(producers.check_gate_up, ops, "cpu", shape, flag)
            yield f"gate and up, {flag}, {shape}", gate_up
            delayed = partial(producers.check_delayed, ops, "cpu", shape, "gaussian", flag)
            yield f"delayed producers, {flag}, {shape}", delayed
            for saved in (False, True):
                check = partial(producers.check_swiglu_backward, ops, "cpu", shape, flag, saved)
                yield f"swiglu backward, {flag}, {saved}, {shape}", check
    for weight, grad in itertools.product(optimizer.WEIGHTS, optimizer.GRADS):
        step = partial(optimizer.check_steps, optimizer.kernel(), "cpu", weight, grad, 0)
        yield f"adamw, {weight}, {grad}", partial(step, _MATRICES)
    parts = card_module(torch_fp8.ops.grad_codec)
    for shape, dtype in itertools.product(SHAPES, messages.DTYPES):
        yield (
            f"gradient, {shape}, {dtype}",
            partial(messages.check_gradient, parts, "cpu", shape, dtype),
        )


def rows_of(launches: list[Launched], equal: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel and variant that was launched, with the sums of its counts."""
    groups: dict[tuple[str, str, int], list[Launched]] = defaultdict(list)
    for launched in launches:
        groups[launched.name, launched.variant, launched.threads // 32].append(launched)
    for (name, variant, warps), group in groups.items():
        counts = [watch for launched in group for watch in launched.watch]

        def total(attribute: str, counts: list[Counts] = counts) -> int:
            return sum(getattr(count, attribute) for count in counts)

        def over(attribute: str, least: str, total: Any = total) -> str:
            return f"{total(attribute) / total(least):.2f}" if total(least) else ""

        elements = sum(launched.elements for launched in group)
        yield {
            "kernel": name,
            "variant": variant,
            "warps": warps,
            "equal": equal,
            "launches": len(group),
            "instructions_per_element": f"{32 * total('instructions') / max(elements, 1):.1f}",
            "requested_over_needed": over("requested", "needed"),
            "sectors_over_least": over("sectors", "least_sectors"),
            "passes_over_least": over("passes", "least_passes"),
            "shared_bytes": max(count.shared_bytes for count in counts),
        }


def run(case: Callable[[], None], target: str) -> tuple[list[dict[str, Any]], str]:
    """Run a case; return its rows, and what was not equal."""
    found = ""
    with emulated(capability=TARGETS[target], watch=lambda: [Counts()]) as emulation:
        try:
            case()
        except Mismatch as mismatch:
            found = str(mismatch)
    return list(rows_of(emulation.launches, not found)), found


def recorded_registers() -> dict[tuple[str, ...], str]:
    """Return the registers of kernels, variants, targets and warps."""
    with kernel_resources.RESULTS.open() as file:
        columns = ("kernel", "variant", "target", "warps")
        return {tuple(r[c] for c in columns): r["registers"] for r in csv.DictReader(file)}


def main() -> None:
    parser = argparse.ArgumentParser(description="count what kernels ask of a card")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--minutes", type=float, default=60, help="none begins after as many")
    chosen = parser.parse_args()
    code = {"triton": metadata.version("triton"), "digest": kernel_resources.digest()}
    rows: list[dict[str, Any]] = []
    if chosen.csv.exists():
        with chosen.csv.open() as file:
            rows = [r for r in csv.DictReader(file) if code.items() <= r.items()]
    done, registers = {(r["case"], r["target"]) for r in rows}, recorded_registers()
    start = time.monotonic()
    for target, (name, case) in itertools.product(chosen.targets, cases()):
        if (name, target) in done or time.monotonic() - start > 60 * chosen.minutes:
            continue
        made, found = run(case, target)
        print(f"{target}, {name}: {found or 'equal'}", flush=True)
        for row in made:
            key = row["kernel"], row["variant"], target, str(row["warps"])
            rows.append({"case": name, "target": target, **row, **code})
            rows[-1]["registers"] = registers.get(key, "")
        with chosen.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    seen = {(r["kernel"], r["variant"], r["target"], str(r["warps"])) for r in rows}
    print(f"{len(seen & registers.keys())} of {len(registers)} recorded variants, in {chosen.csv}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
