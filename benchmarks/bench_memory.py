"""Peak memory of a full fine-tuning step by category, per layout and level.

    python -m benchmarks.bench_memory            # on a GPU; runs/benchmarks/memory.csv
    python -m benchmarks.bench_memory --fake     # without one, counted; memory_counted.csv
    python -m benchmarks.bench_memory --toy      # a tiny model, also on a CPU

Layouts of Llama-3.2-1B, -3B and 3.1-8B, one sequence of 4096 or ``--sequence`` tokens, AdamW, under
autocast: BF16-mixed and our levels, with activation checkpointing and without. The second step
(the first creates the optimizer's states) is tracked storage by storage, by category
(torch_fp8_tools/plan/memory_tracker.py):

* weights, residuals, gradients, states of the optimizer, activations saved for backward, and
  workspace: everything else, mainly casts of weights and logits. The columns are the bytes alive at
  the moment of the peak, in MiB, and ``peak_mib`` is their sum;
* ``measured_mib``: the allocator's peak over a third step, including memory within kernels;
* ``setup_mib``: the allocator's peak from the creation of the model to the end of the first step.

``--fake`` runs the same step on tensors that have shapes but no memory, with the CPU's operators:
it counts, and does not measure.
"""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.card import free
from benchmarks.measurement import (
    NOT_REACHED,
    Budget,
    Table,
    default_device,
    environment,
    note_of,
    parser,
    print_table,
)
from benchmarks.plot import draw
from benchmarks.shapes import LAYOUTS, SEQUENCE, TOY_LLAMA, TOY_SEQUENCE
from benchmarks.training_run import Variant, bigram_tokens, causal_lm, optimizer_of
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.kernels.arguments import GradientParts
from torch_fp8.ops.grad_codec import Rounding
from torch_fp8.optim import optimizer as float8_optimizer
from torch_fp8.optim.residual import residual_of
from torch_fp8.quantization.block_scaled import num_groups
from torch_fp8.tensor import float8_grad
from torch_fp8.tensor.split_weight import stored
from torch_fp8_tools.plan.memory_tracker import CATEGORIES, MemoryTracker
from torch_fp8_tools.plan.models import unpadded_rows

COLUMNS = (
    *("kind", "model", "variant", "checkpointing", "batch", "sequence"),
    *CATEGORIES,
    *("peak_mib", "measured_mib", "setup_mib", "share_of_bf16", "loss", "note"),
)
BF16 = "bf16-mixed"
PLAIN = Variant(BF16)
FP8 = {"recipe": "tensorwise"}
"""The recipe, by name: auto's measurement would count as set-up and may leave layers in BF16."""
VARIANTS: dict[str, dict[str, Any]] = {
    BF16: {},
    "O1": {**FP8, "opt_level": "O1"},
    "O2": FP8,
    "O3": {**FP8, "opt_level": "O3"},
    "O3, release": {**FP8, "opt_level": "O3", "gradient_release": True},
}
TARGET_GIB = 80.0
"""The memory under which full fine-tuning of Llama-3.1-8B at sequence 4096 is to stay."""


class Case(NamedTuple):
    """A model, its level, and the other options of a measurement."""

    model: str
    variant: str
    checkpointing: bool
    batch: int
    sequence: int


def main() -> None:
    arguments = parser("memory", __doc__, without_gpu=("--fake",))
    arguments.add_argument("--fake", action="store_true", help="count on tensors without memory")
    arguments.add_argument("--models", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    arguments.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    arguments.add_argument("--batch", type=int, default=1, help="sequences per step")
    arguments.add_argument("--sequence", type=int, default=SEQUENCE, help="tokens of a sequence")
    arguments = arguments.parse_args()
    if arguments.fake and arguments.csv.name == "memory.csv":
        arguments.csv = arguments.csv.with_name("memory_counted.csv")
    device = torch.device("cpu") if arguments.fake else default_device()
    about = environment(device)
    key = ("kind", *Case._fields)
    sequence = TOY_SEQUENCE if arguments.toy else arguments.sequence
    table, budget = Table(arguments.csv, COLUMNS, key, about), Budget(arguments.budget)
    layouts = {"toy": TOY_LLAMA} if arguments.toy else {n: LAYOUTS[n] for n in arguments.models}
    cases = [
        Case(model, variant, checkpointing, arguments.batch, sequence)
        for model in layouts
        for checkpointing in (False, True)
        for variant in arguments.variants
    ]
    for case in cases:
        if not budget.fits():
            table.add([row_of(case, arguments, {"note": NOT_REACHED})])
            continue
        with budget.piece():
            figures = try_measure(case, layouts[case.model], arguments, device)
            baseline = next((r for r in table.rows if same_but_bf16(r, case)), None)
            if baseline and baseline.get("peak_mib") and "peak_mib" in figures:
                share = figures["peak_mib"] / baseline["peak_mib"]
                figures["share_of_bf16"] = round(share, 3)
            table.add([row_of(case, arguments, figures)])
    draw(arguments.csv)
    shown = ("model", "variant", "checkpointing", *CATEGORIES, "peak_mib", "measured_mib")
    print_table((*shown, "share_of_bf16", "note"), table.rows)
    print_verdict(table.rows)


def row_of(case: Case, arguments: argparse.Namespace, figures: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the CSV."""
    kind = "counted" if arguments.fake else "measured"
    return {"kind": kind, **case._asdict(), **figures}


def same_but_bf16(row: dict[str, Any], case: Case) -> bool:
    """Return whether a row is BF16-mixed's of the same model, batch, length and checkpointing."""
    return all(row[f] == getattr(case._replace(variant=BF16), f) for f in Case._fields)


def try_measure(
    case: Case, layout: dict[str, Any], arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Return the figures of a case, or a note."""
    try:
        figures = measure(case, layout, arguments, device)
    except Exception as error:
        figures = {"note": note_of(error)}
    free(device)
    return figures


def measure(
    case: Case, layout: dict[str, Any], arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Run the steps of a case."""
    tokens = bigram_tokens(3 * case.batch, case.sequence, layout["vocab_size"]).to(device)
    on_gpu = device.type == "cuda"
    model = meta_model(case, layout) if arguments.fake else None
    with without_memory() if arguments.fake else contextlib.nullcontext():
        _reset(on_gpu)
        if model is None:
            model = causal_lm(layout, PLAIN, device)
            convert(model, case)
        else:
            tokens = torch.empty_like(tokens)
            model.to_empty(device=device)
            model.tie_weights()
        optimizer = optimizer_for(case, model, device)
        first, second, third = tokens.split(case.batch)
        train_step(model, optimizer, first, device)
        setup = _peak(on_gpu)
        tracker = MemoryTracker(model.parameters())
        assign_standing(tracker, model, optimizer)
        tracker.peak = dict(tracker.current)
        with tracker:
            train_step(model, optimizer, second, device)
        _reset(on_gpu)
        loss = train_step(model, optimizer, third, device)
        measured = _peak(on_gpu)
    figures: dict[str, Any] = {c: round(tracker.peak[c] / 2**20, 1) for c in CATEGORIES}
    figures["peak_mib"] = round(sum(tracker.peak.values()) / 2**20, 1)
    if on_gpu:
        figures |= {"measured_mib": round(measured, 1), "setup_mib": round(setup, 1)}
    if not arguments.fake:
        figures["loss"] = round(float(loss), 5)
    return figures


def meta_model(case: Case, layout: dict[str, Any]) -> nn.Module:
    """Return a converted model on the meta device, because conversion refuses fake weights."""
    model = causal_lm(layout, PLAIN, torch.device("meta"))
    convert(model, case)
    return model


def convert(model: nn.Module, case: Case) -> None:
    """Apply the case's checkpointing and FP8."""
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.variant != BF16:
        convert_to_float8(model, FP8Config(**VARIANTS[case.variant]), device=_target(model))


def optimizer_for(case: Case, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW, converted as the case's level says."""
    optimizer = optimizer_of(PLAIN, model.parameters(), device)
    config = FP8Config(**VARIANTS[case.variant])
    if case.variant != BF16 and config.opt_level != "O1":
        convert_optimizer(optimizer, config, model=model)
    return optimizer


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Use tensors with shapes but no memory; kernels that write in place do nothing."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        unpadded_rows(),
        mock.patch.object(float8_optimizer, "step_large"),
        mock.patch.object(float8_optimizer, "step_small"),
        mock.patch.object(float8_grad, "quantize_gradient", _no_codes),
        mock.patch.object(Rounding, "next"),
    ):
        yield


def _no_codes(x: Tensor, _: object) -> GradientParts:
    """Return the empty tensors of an 8-bit gradient."""
    rows, cols = x.shape
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, num_groups(cols), dtype=torch.uint8, device=x.device)
    return GradientParts(codes, scales, torch.ones((), device=x.device))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, device: torch.device
) -> Tensor:
    """Run one step and return its loss."""
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def assign_standing(
    tracker: MemoryTracker, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Tell the tracker which tensors exist between steps."""
    for tensor in (*model.parameters(), *model.buffers()):
        tracker.assign(stored(tensor), "weights")
    for category, tensor in state_tensors(optimizer):
        tracker.assign(tensor, category)


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's tensors with their categories."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor):
                yield "states", value
        residual = residual_of(parameter)
        if residual is not None:
            yield "residuals", residual


def print_verdict(rows: list[dict[str, Any]]) -> None:
    """Print, variant by variant, whether Llama-3.1-8B stays under the target at 4,096 tokens."""
    for row in rows:
        if row["model"] == "Llama-3.1-8B" and int(row["sequence"]) == SEQUENCE:
            name = f"{row['variant']}{', checkpointing' if row['checkpointing'] else ''}"
            mib = row.get("measured_mib") or row.get("peak_mib")
            if not mib:
                print(f"8B, {name}: {row['note']}")
                continue
            verdict = "under" if mib / 1024 < TARGET_GIB else "NOT under"
            print(f"8B, {name}: {mib / 1024:.1f} GiB, {verdict} {TARGET_GIB:.0f}")


def _target(model: nn.Module) -> torch.device:
    device = next(model.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def _reset(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()


def _peak(on_gpu: bool) -> float:
    if not on_gpu:
        return 0.0
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


if __name__ == "__main__":
    main()
