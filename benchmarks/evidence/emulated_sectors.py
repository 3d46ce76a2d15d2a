"""Instructions and sectors of kernels at shapes without tails, counted in the emulator of PTX.

    python -m benchmarks.evidence.emulated_sectors         # rows "now"
    python -m benchmarks.evidence.emulated_sectors --docs  # the table of docs/results.md

A warp's access requests sectors of 32 bytes; it needs as many as its bytes fill. A sector that is
requested twice comes from a cache, but takes the multiprocessor's time. Rows "before" are from the
commit before accesses set how many bytes a thread moves at once (``--as before``, run there). The
target is Hopper; `evidence.emulated_kernels` has every variant, both targets and tails. Nothing is
timed.
"""

import argparse
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

import torch_fp8.ops.grad_codec
import torch_fp8.ops.messages
from benchmarks.evidence import kernel_resources
from benchmarks.evidence.emulated_kernels import rows_of
from benchmarks.evidence.kernel_variants import values
from benchmarks.rows import add_csv, read_rows, write_rows
from tests import kernel_code
from tests.emulator.counts import Counts
from tests.emulator.driver import emulated
from tests.emulator.on_card import card_module
from tests.kernel_cases import messages, optimizer
from tests.torch_fp8.loss_head.loss_cases import logits_of, terms_of
from torch_fp8.kernels import cross_entropy, quantize, rms_norm, swiglu, swiglu_backward
from torch_fp8.kernels.arguments import (
    BackwardInputs,
    CastOptions,
    NormBackwardInputs,
    NormInputs,
    NormWithRstd,
)
from torch_fp8.kernels.loss_arguments import LogitForm
from torch_fp8.ops.messages import Layout
from torch_fp8.ops.quantize import save_input

RESULTS = kernel_resources.RESULTS.with_name("emulated_sectors.csv")
PAGE = kernel_resources.ROOT / "docs" / "results.md"
MARK = "<!-- table: python -m benchmarks.evidence.emulated_sectors --docs -->"
_COUNTS = ("instructions_per_element", "sectors_per_element", "sectors_over_least")
COLUMNS = ("as", "what", "kernel", *_COUNTS, "triton", "digest")
SHAPE, CLASSES = (128, 4096), 128256
E4M3 = torch.float8_e4m3fn


def cases() -> dict[str, Callable[[], Any]]:
    """Return functions that launch kernels, by name; weights and inputs are in BF16."""
    x, weight, rstd = values(*SHAPE, dtype=torch.bfloat16), values(SHAPE[1]), values(SHAPE[0])
    one, saved = torch.ones(()), save_input(x)

    def cast(granularity: str, row: bool, col: bool, *known: Tensor) -> Callable[[], Any]:
        options = CastOptions(E4M3, granularity, granularity != "tensorwise", row, col, *known)
        return partial(quantize.quantize_2d, x, options)

    blocks = CastOptions(E4M3, "block_1x128", True, True, True)
    backward = NormBackwardInputs(x, *saved, weight, rstd, 0.0, x.dtype, True)
    gradient = BackwardInputs(x, *saved, *saved, x.dtype)
    step, codec = optimizer.kernel(), card_module(torch_fp8.ops.grad_codec)
    wire, layout = card_module(torch_fp8.ops.messages), Layout(4096, 8)
    sent = (layout, 4 * 4096 * 32, torch.bfloat16, 0, None)
    bits = "bf16 with 8 bits"
    logits, terms = logits_of(128, CLASSES, x.dtype), terms_of(128, CLASSES, "plain")
    loss, known = (logits, terms, LogitForm()), terms._replace(lse=torch.zeros(128))
    to_fp8 = (logits, known, LogitForm(), one, True, True, False)
    return {
        "tensorwise, scale known": cast("tensorwise", True, True, one),
        "tensorwise, forward alone": cast("tensorwise", True, False, one),
        "rowwise, rows": cast("rowwise", True, False),
        "rowwise, columns": cast("rowwise", False, True),
        "1x128": cast("block_1x128", True, True),
        "128x128": cast("block_128x128", True, True),
        "1x32": cast("block_1x32", True, True),
        "delayed": cast("tensorwise", True, True, one, torch.zeros(())),
        "statistics of RMSNorm": partial(
            rms_norm.rms_norm_statistics, NormInputs(x, weight, 1e-5, 0.0, x.dtype), True
        ),
        "RMSNorm to 1x128": partial(
            rms_norm.rms_norm_quantize, NormWithRstd(x, weight, rstd, 0.0, x.dtype), blocks
        ),
        "RMSNorm backward": partial(rms_norm.rms_norm_backward, backward),
        "SwiGLU to 1x128": partial(swiglu.swiglu_quantize, x, x, None, blocks, True),
        "SwiGLU backward to 1x128": partial(
            swiglu_backward.swiglu_backward_quantize, gradient, blocks
        ),
        "loss and gradient of BF16 logits": partial(
            cross_entropy.cross_entropy_rows, *loss, True, False
        ),
        "loss": partial(cross_entropy.cross_entropy_rows, *loss, False, False),
        "gradient of logits to FP8": partial(cross_entropy.cross_entropy_quantize, *to_fp8),
        "AdamW": partial(optimizer.check_steps, step, "cpu", bits, "bf16", 0, [(128, 1024)]),
        "AdamW with the payload": partial(
            optimizer.check_payload, step, "cpu", bits, "tensorwise", False, [(128, 512)]
        ),
        "8-bit gradients": partial(
            messages.check_gradient, codec, "cpu", (32, 4096), torch.bfloat16
        ),
        "messages": partial(messages.check_messages, wire, "cpu", *sent),
    }


def measure(state: str) -> list[dict[str, Any]]:
    """Return a row for each case and kernel, for its variant with the most launches."""
    rows = []
    version, code = metadata.version("triton"), kernel_code.digests()
    for what, case in cases().items():
        with emulated(watch=lambda: [Counts()]) as emulation:
            case()
        best: dict[str, dict[str, Any]] = {}
        for row in rows_of(emulation.launches, {}):
            if row["launches"] > best.get(row["kernel"], {"launches": 0})["launches"]:
                best[row["kernel"]] = row
        for kernel, row in best.items():
            counts = {name: row[name] for name in _COUNTS}
            names = {"as": state, "what": what, "kernel": kernel, "digest": code[kernel]}
            rows.append(names | counts | {"triton": version})
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of docs/results.md."""
    states = {state: {} for state in ("before", "now")}
    for row in rows:
        states[row["as"]][row["what"], row["kernel"]] = row
    lines = [
        "| what, kernel | instructions | sectors | over the least | before |",
        "|---|---|---|---|---|",
    ]
    for (what, kernel), row in states["now"].items():
        before = states["before"].get((what, kernel))
        cells = [f"{what}, `{kernel.removesuffix('_kernel')}`", *(row[name] for name in _COUNTS)]
        cells.append("" if before is None else before["sectors_over_least"])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_docs() -> None:
    """Put the table between its two marks."""
    head, _, tail = PAGE.read_text().split(MARK)
    lines = table(read_rows(RESULTS))
    PAGE.write_text("\n".join([head + MARK, "", *lines, "", MARK + tail]))


def main() -> None:
    parser = argparse.ArgumentParser(description="count instructions and sectors of kernels")
    add_csv(parser, "emulated_sectors")
    parser.add_argument("--as", dest="state", choices=("before", "now"), default="now")
    parser.add_argument("--docs", action="store_true", help="write the table into docs and exit")
    chosen = parser.parse_args()
    if chosen.docs:
        write_docs()
        return
    rows: list[dict[str, Any]] = []
    rows += (row for row in read_rows(chosen.csv) if row["as"] != chosen.state)
    rows += measure(chosen.state)
    write_rows(chosen.csv, COLUMNS, sorted(rows, key=lambda row: row["as"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
