"""Compare compiled kernels with their references in the emulator of their PTX, and count their
instructions and memory accesses.

    python -m benchmarks.evidence.emulated_kernels    # runs/benchmarks/emulated_kernels.csv

Every variant in the CSV of `evidence.kernel_resources` is launched with few rows, with tails and
odd sizes, compiled for Hopper and Blackwell; Triton's launcher launches and `tests.emulator` runs
it. A row is a kernel, its compile-time choices and the case that launched it; variants without a
launch have rows without a case. A row has the digest of its kernel's code and of all code that it
calls; cases in the file with this version of Triton and today's digests are not run again.
Nothing is timed:

* ``equal``: whether results equal the reference's, bit for bit if it promises that, otherwise
  within the bounds of the GPU tests;
* ``instructions_per_element``: instructions of all threads, over the elements of the largest
  tensor;
* ``sectors_per_element``: sectors of 32 bytes, over the same;
* ``requested_over_needed``: bytes that threads load and store, over the distinct ones among them;
* ``sectors_over_least``: sectors, over the minimum for the bytes of each request of a warp;
* ``passes_over_least``: passes over the banks of shared memory; 1 means no conflicts;
* ``registers``: registers of a thread, from the CSV of `benchmarks.evidence.kernel_resources`.

To share the work among processes, each writes the rows of one target to its own file, and
``--rows FILE ...`` joins them.
"""

import argparse
import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import torch_fp8.ops.cross_entropy
import torch_fp8.ops.grad_codec
import torch_fp8.ops.messages
from benchmarks.evidence import kernel_resources
from benchmarks.evidence.kernel_variants import few_rows, launching, unaligned_messages
from benchmarks.rows import add_csv, read_rows, tell_kept, write_rows
from tests import kernel_code
from tests.emulator.compared import Comparison
from tests.emulator.counts import Counts
from tests.emulator.driver import Emulation, Launched, emulated
from tests.emulator.families import BF16, expert_gate, families
from tests.emulator.faults import Fault
from tests.emulator.on_card import card_module
from tests.emulator.ptx import PtxError
from tests.kernel_cases import messages, optimizer
from tests.kernel_cases.comparison import Mismatch
from tests.kernel_cases.experts import FORMS
from tests.torch_fp8.loss_head import loss_cases
from torch_fp8.ops.messages import Layout

RESULTS = kernel_resources.RESULTS.with_name("emulated_kernels.csv")
TARGETS = {"sm_90": (9, 0), "sm_100": (10, 0)}
COLUMNS = (
    *("case", "kernel", "variant", "target", "warps", "equal", "launches"),
    *("instructions_per_element", "sectors_per_element", "requested_over_needed"),
    *("sectors_over_least", "passes_over_least", "shared_bytes", "registers", "triton", "digest"),
)
_MATRICES = ((100, 128), (64, 272), (5, 48), (36, 33), (3, 7))
_LAID_OUT = ((200, 64), (200, 48), (200, 33))
"""Gradients in each of the layouts of `torch_fp8.kernels.block_scaled`."""
Case = Callable[[Emulation], dict[int, str]]


def cases() -> Iterator[tuple[str, Case]]:
    """Yield the cases by name; each returns which of its launches were unequal, and how."""
    for name, launch in launching():
        yield name, partial(_compared, launch)
    of_kernels = itertools.chain(_optimizer(), _wire(), _experts(), _losses(), families().items())
    for name, check in of_kernels:
        yield name, partial(_checked, check)


def _compared(launch: Callable[[], None], emulation: Emulation) -> dict[int, str]:
    comparison = Comparison(emulation.launches)
    with few_rows(), comparison.all_functions():
        launch()
    return comparison.unequal


def _checked(check: Callable[[], None], emulation: Emulation) -> dict[int, str]:
    try:
        check()
    except (Mismatch, Fault) as error:
        return dict.fromkeys(range(len(emulation.launches)), str(error))
    return {}


def _optimizer() -> Iterator[tuple[str, Callable[[], None]]]:
    from torch_fp8.kernels.adamw import update_rms

    step = partial(optimizer.check_steps, optimizer.kernel(), "cpu")
    for weight, grad in itertools.product(optimizer.WEIGHTS, optimizer.GRADS):
        yield f"adamw, {weight}, {grad}", partial(step, weight, grad, 0, _MATRICES)
    low_bits = ("bf16 with 8 bits",)
    for weight, grad in itertools.product(low_bits, ("bf16", "8-bit")):
        amax = partial(step, weight, grad, 0, _MATRICES, finds_amax=True)
        yield f"adamw with the amax, {weight}, {grad}", amax
    payload = partial(optimizer.check_payload, optimizer.kernel(), "cpu", shapes=[(144, 160)])
    for weight, grad in itertools.product((*low_bits, "fp32"), ("bf16", "8-bit")):
        for granularity, power_of_two in itertools.product(
            ("tensorwise", "block_128x128"), (False, True)
        ):
            powers = ", powers of two" * power_of_two
            name = f"adamw, {weight}, {grad}, payload {granularity}{powers}"
            yield name, partial(payload, weight, granularity, power_of_two, grad=grad)
    for grad, coupled in itertools.product(optimizer.GRADS, (0.0, 0.1)):
        check = partial(optimizer.check_update_rms, update_rms, "cpu", grad, coupled, _MATRICES)
        yield f"size of updates, {grad}, {coupled}", check


def _wire() -> Iterator[tuple[str, Callable[[], None]]]:
    parts, wire = card_module(torch_fp8.ops.grad_codec), card_module(torch_fp8.ops.messages)
    for shape, dtype in itertools.product(_LAID_OUT, messages.DTYPES):
        check = partial(messages.check_gradient, parts, "cpu", shape, dtype)
        yield f"gradient, {shape}, {dtype}", check
    for dtype, (name, keys) in itertools.product(messages.DTYPES, messages.KEYS.items()):
        for less in (48, 7):
            arguments = Layout(100, 9), 4 * 100 * 32 - less, dtype, 0, keys
            check = partial(messages.check_messages, wire, "cpu", *arguments)
            yield f"messages, {name}, {less} less, {dtype}", check
    yield "messages at odd addresses", unaligned_messages


def _experts() -> Iterator[tuple[str, Callable[[], None]]]:
    for dtype, form, bias in itertools.product(
        (BF16, torch.float16, torch.float32), FORMS, (False, True)
    ):
        yield (
            f"expert gate, {form}, {dtype}{', bias' * bias}",
            partial(expert_gate, form, bias, dtype),
        )


def _losses() -> Iterator[tuple[str, Callable[[], None]]]:
    card = card_module(torch_fp8.ops.cross_entropy)
    for dtype, cols in (*((d, 2064) for d in (BF16, torch.float16, torch.float32)), (BF16, 1003)):
        for form, kind in loss_cases.chosen(dtype, cols):
            check = partial(loss_cases.check_chosen, card, "cpu", form, kind, dtype, cols)
            yield f"losses, {form}, {kind}, {dtype}, {cols} classes", check


def rows_of(launches: list[Launched], unequal: dict[int, str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel and variant that was launched, with the sums of its counts."""
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for number, launched in enumerate(launches):
        groups[launched.name, launched.variant, launched.threads // 32].append(number)
    for (name, variant, warps), numbers in groups.items():
        group = [launches[number] for number in numbers]
        counts = [watch for launched in group for watch in launched.watch]
        total = {name: sum(getattr(count, name) for count in counts) for name in _COUNTED}
        elements = max(sum(launched.elements for launched in group), 1)
        yield {
            "kernel": name,
            "variant": variant,
            "warps": warps,
            "equal": not any(number in unequal for number in numbers),
            "launches": len(group),
            "instructions_per_element": f"{32 * total['instructions'] / elements:.1f}",
            "sectors_per_element": f"{total['sectors'] / elements:.3f}",
            "requested_over_needed": _ratio(total["requested"], total["needed"]),
            "sectors_over_least": _ratio(total["sectors"], total["least_sectors"]),
            "passes_over_least": _ratio(total["passes"], total["least_passes"]),
            "shared_bytes": max(count.shared_bytes for count in counts),
        }


_COUNTED = (
    *("instructions", "requested", "needed", "sectors", "least_sectors"),
    *("passes", "least_passes"),
)


def _ratio(count: int, least: int) -> str:
    return f"{count / least:.2f}" if least else ""


def run(case: Case, target: str) -> tuple[list[dict[str, Any]], str]:
    """Run a case; return its rows and its unequal results."""
    options: dict[str, Any] = {"capability": TARGETS[target], "watch": lambda: [Counts()]}
    with emulated(**options) as emulation:
        try:
            unequal = case(emulation)
        except PtxError as error:
            unequal = dict.fromkeys(range(len(emulation.launches)), str(error))
    differences = sorted(set(unequal.values()))
    return list(rows_of(emulation.launches, unequal)), "; ".join(differences)


@functools.cache
def recorded_registers() -> dict[tuple[str, ...], str]:
    """Return the registers of kernels, variants, targets and warps."""
    columns = ("kernel", "variant", "target", "warps")
    recorded = read_rows(kernel_resources.RESULTS)
    return {tuple(r[c] for c in columns): r["registers"] for r in recorded}


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the key that a variant and a row have in common."""
    return row["kernel"], row["variant"], row["target"], str(row["warps"])


def read(paths: list[Path], digests: dict[str, str]) -> list[dict[str, Any]]:
    """Return the distinct rows of files, without cases whose kernels' code has changed."""
    cases: dict[tuple[str, ...], dict[tuple[str, ...], dict[str, Any]]] = defaultdict(dict)
    for row in itertools.chain.from_iterable(map(read_rows, paths)):
        if row["case"]:
            cases[row["case"], row["triton"], row["target"]][key_of(row)] = row
    rows = [list(of_case.values()) for of_case in cases.values()]
    current = (r for r in rows if all(digests.get(x["kernel"]) == x["digest"] for x in r))
    return list(itertools.chain.from_iterable(current))


def write(path: Path, rows: list[dict[str, Any]], digests: dict[str, str]) -> None:
    """Write rows, and one for each recorded variant that none of them has."""
    seen = {(row["triton"], *key_of(row)) for row in rows}
    triton, missing = metadata.version("triton"), []
    for key in recorded_registers():
        if (triton, *key) not in seen:
            row = dict(zip(("kernel", "variant", "target", "warps"), key, strict=True))
            row |= {"equal": "missing", "triton": triton, "digest": digests.get(key[0], "")}
            missing.append(row)
    write_rows(path, COLUMNS, [*rows, *missing])


def main() -> None:
    parser = argparse.ArgumentParser(description="count what kernels ask of a card")
    add_csv(parser, "emulated_kernels")
    parser.add_argument("--rows", type=Path, nargs="+", default=[], help="files of other processes")
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--cases", nargs="+", default=[], help="names; none: all")
    parser.add_argument(
        "--minutes", type=float, default=60, help="begin no case after these minutes"
    )
    chosen = parser.parse_args()
    tell_kept(chosen.csv)
    triton, digests = metadata.version("triton"), kernel_code.digests()
    rows = read([chosen.csv, *chosen.rows], digests)
    done = {(r["case"], r["target"]) for r in rows if r["triton"] == triton}
    start = time.monotonic()
    for target, (name, case) in itertools.product(chosen.targets, cases()):
        if chosen.cases and name not in chosen.cases:
            continue
        if (name, target) in done or time.monotonic() - start > 60 * chosen.minutes:
            continue
        case_start = time.process_time()
        new, differences = run(case, target)
        seconds = time.process_time() - case_start
        print(f"{target}, {name}: {differences or 'equal'}, {seconds:.0f} s", flush=True)
        for row in new:
            row |= {"case": name, "target": target, "triton": triton}
            row |= {"digest": digests[row["kernel"]]}
            rows.append(row | {"registers": recorded_registers().get(key_of(row), "")})
        write(chosen.csv, rows, digests)
    write(chosen.csv, rows, digests)
    seen = {key_of(row) for row in rows if row["triton"] == triton}
    recorded = recorded_registers().keys()
    print(f"{len(seen & recorded)} of {len(recorded)} recorded variants, in {chosen.csv}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
