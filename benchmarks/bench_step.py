"""A full fine-tuning step of Llama layouts through the real Lightning Trainer and Accelerate.

    python -m benchmarks.bench_step            # on a GPU; runs/benchmarks/step.csv
    python -m benchmarks.bench_step --toy      # a tiny model, also on a CPU

Layouts of Llama-3.2-1B, -3B and 3.1-8B with random weights, sequences of 4096, learnable tokens,
AdamW; as many sequences per step as fit into the card in BF16-mixed. BF16-mixed, our levels,
torchao (its linears with fused AdamW, and with its low-bit AdamW on BF16 weights) and Transformer
Engine, eager and with the decoder layers compiled, in one process: each round runs a few steps of
every variant in turn, from the same weights on the same tokens.

* ``median_ms``: from the beginning of a step to that of the next, on the GPU; ``forward_ms``,
  ``backward_ms``, ``optimizer_ms``: medians of its phases (with gradient release the optimizer
  runs in backward).
* ``loss``: of the last step; ``loss_difference``: of the mean over the measured steps, against
  bf16-mixed in the same host and mode.
* ``speedup``: over bf16-mixed in the same host and mode, ``speedup_over_compiled``: over compiled
  bf16-mixed, at equal batch; of adapters (``LoRA``) over those of bf16-mixed.
* ``recipe``: recipe of our linears, for which ``floor_ms`` holds. In ``fp8-mixed`` it is ``auto``'s
  choice, which may leave some linears in BF16 (``fp8_linears``).
* ``peak_mib``: peak of the measured steps; ``run_peak_mib``: peak including everything before them.
* ``floor_ms``: counted bytes and FLOPs at the card's measured rates (benchmarks/roofline.py);
  adapters have none.
* step_kernels.csv, in the same folder: the kernels of one more step of each variant.
* ``--largest``: each variant at the largest batch that fits, too, found from its peaks at 1 and 2.
"""

import argparse
import contextlib
import math
import statistics
from typing import Any, NamedTuple

import torch

from benchmarks import kernels
from benchmarks.bench_linear import traffic
from benchmarks.card import free, measured_rates
from benchmarks.measurement import (
    GRAPHS,
    NOT_REACHED,
    RESULTS,
    Budget,
    Table,
    default_device,
    environment,
    graphs_counted,
    layers_apart,
    note_of,
    parser,
    print_table,
    read_rows,
    timing_of,
)
from benchmarks.plot import draw
from benchmarks.roofline import Rates, step_seconds
from benchmarks.shapes import (
    LLAMA_3_1_8B,
    LLAMA_3_2_1B,
    LLAMA_3_2_3B,
    SEQUENCE,
    TOY_LLAMA,
    TOY_SEQUENCE,
    parameter_count,
)
from benchmarks.training_run import HOSTS, PHASES, WARMUP_STEPS, Run, Variant, bigram_tokens
from torch_fp8_tools.plan.memory_tracker import CATEGORIES

COLUMNS = (
    *("model", "host", "variant", "mode", "batch", "sequence", "median_ms", "p20_ms", "p80_ms"),
    *(f"{phase}_ms" for phase in PHASES),
    *("tokens_per_s", "floor_ms", "floor_share", "speedup", "speedup_over_compiled"),
    *("peak_mib", "run_peak_mib", "peak_share", "fp8_linears", "recipe"),
    *("loss", "loss_difference", "steps", *GRAPHS, "note"),
)
BF16, FP8, LORA = "bf16-mixed", "fp8-mixed", "bf16-mixed, LoRA"
VARIANTS = {
    BF16: Variant(BF16),
    FP8: Variant(FP8, optimizer_bytes=12.1),
    "fp8-mixed, O3": Variant(FP8, {"opt_level": "O3"}, optimizer_bytes=11.2),
    "fp8-mixed, O3, release": Variant(
        FP8, {"opt_level": "O3", "gradient_release": True}, optimizer_bytes=11.2
    ),
    "fp8-mixed, FP8 head": Variant(FP8, {"loss_head": "fp8"}, optimizer_bytes=12.1),
    "fp8-mixed, stock head": Variant(FP8, {"loss_head": "off"}, optimizer_bytes=12.1),
    "fp8-mixed, layers apart": Variant(FP8, optimizer_bytes=12.1, apart=True),
    "fp8-mixed, last step's scales": Variant(
        FP8, {"graph_scales": "last_step"}, optimizer_bytes=12.1
    ),
    "fp8-mixed, cached weights": Variant(FP8, {"cache_weights": True}, optimizer_bytes=12.1),
    "fp8-mixed, delayed": Variant(FP8, {"recipe": "delayed"}, optimizer_bytes=12.1),
    "fp8-mixed, blockwise": Variant(FP8, {"recipe": "blockwise"}, optimizer_bytes=12.1),
    "fp8-mixed, Transformer Engine": Variant(
        FP8, {"backend": "transformer-engine"}, optimizer_bytes=12.1
    ),
    "torchao tensorwise": Variant(BF16, peer="torchao tensorwise"),
    "torchao rowwise": Variant(BF16, peer="torchao rowwise"),
    "torchao tensorwise, AdamWFp8": Variant(
        "bf16-true", peer="torchao tensorwise", optimizer="AdamWFp8", optimizer_bytes=10.0
    ),
    "torchao rowwise, AdamW8bit": Variant(
        "bf16-true", peer="torchao rowwise", optimizer="AdamW8bit", optimizer_bytes=10.0
    ),
    "torchao by Accelerate": Variant(BF16, peer="torchao by Accelerate"),
    "Transformer Engine delayed": Variant(BF16, peer="Transformer Engine delayed"),
    "Transformer Engine blockwise": Variant(BF16, peer="Transformer Engine blockwise"),
    "bf16-true": Variant("bf16-true", optimizer_bytes=14.0),
    LORA: Variant(BF16, lora=16),
    "fp8-mixed, LoRA": Variant(FP8, lora=16),
}
# (host, mode, variant), the most telling first: a budget that runs out leaves out the last ones.
CASES = [
    ("lightning", "compiled", BF16),
    ("lightning", "compiled", FP8),
    ("lightning", "compiled", "fp8-mixed, FP8 head"),
    ("lightning", "compiled", "torchao tensorwise, AdamWFp8"),
    ("lightning", "eager", FP8),
    ("lightning", "compiled", "fp8-mixed, layers apart"),
    ("lightning", "compiled", "fp8-mixed, stock head"),
    ("accelerate", "compiled", FP8),
    ("lightning", "compiled", "fp8-mixed, last step's scales"),
    ("lightning", "compiled", "torchao tensorwise"),
    ("lightning", "compiled", LORA),
    ("lightning", "compiled", "fp8-mixed, LoRA"),
    ("lightning", "compiled", "fp8-mixed, cached weights"),
    ("lightning", "compiled", "fp8-mixed, delayed"),
    ("lightning", "eager", BF16),
    ("lightning", "eager", "fp8-mixed, O3, release"),
    ("lightning", "eager", LORA),
    ("lightning", "eager", "fp8-mixed, LoRA"),
    ("accelerate", "compiled", BF16),
    ("lightning", "compiled", "torchao rowwise"),
    ("lightning", "compiled", "torchao rowwise, AdamW8bit"),
    ("lightning", "compiled", "fp8-mixed, blockwise"),
    ("lightning", "eager", "Transformer Engine delayed"),
    ("lightning", "eager", "Transformer Engine blockwise"),
    ("lightning", "eager", "fp8-mixed, Transformer Engine"),
    ("lightning", "eager", "fp8-mixed, O3"),
    ("lightning", "compiled", "bf16-true"),
    ("accelerate", "eager", BF16),
    ("accelerate", "eager", FP8),
    ("accelerate", "eager", "torchao by Accelerate"),
]
MODELS = {
    "Llama-3.2-1B": LLAMA_3_2_1B,
    "Llama-3.1-8B, 8 layers": LLAMA_3_1_8B | {"num_hidden_layers": 8},
    "Llama-3.2-3B": LLAMA_3_2_3B,
    "Llama-3.1-8B": LLAMA_3_1_8B,
}
"""Layouts, the most telling first."""
MOST_SEQUENCES = 8
"""The maximum number of sequences per step: more would take longer and show nothing new."""
SEEN = 0.9
"""The share of the memory that counted peaks may take: they miss what kernels allocate inside."""
COUNTED = RESULTS / "memory_counted.csv"
USABLE = 0.97  # of the card's memory: the rest is fragments, and other libraries'


class Case(NamedTuple):
    """One of `CASES` at a batch size."""

    host: str
    mode: str
    variant: str
    batch: int


def main() -> None:
    arguments = parser("step", __doc__)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    arguments.add_argument("--modes", nargs="+", choices=("eager", "compiled"))
    arguments.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    arguments.add_argument(
        "--batch", type=int, help="sequences per step; default: by model and the card's memory"
    )
    arguments.add_argument("--largest", action="store_true", help="the largest batches, too")
    arguments.add_argument("--steps", type=int, default=6, help="measured steps per round")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments = arguments.parse_args()
    modes = arguments.modes or (("eager",) if arguments.toy else ("eager", "compiled"))
    layouts = {name: MODELS[name] for name in arguments.models}
    if arguments.toy:
        layouts = {"toy": TOY_LLAMA}
        arguments.steps, arguments.rounds = 2, 1
    device, budget = default_device(), Budget(arguments.budget)
    key = ("model", "host", "variant", "mode", "batch", "sequence")
    table = Table(arguments.csv, COLUMNS, key, environment(device))
    where = arguments.csv.with_name("step_kernels.csv")
    profiles = Table(where, (*key, *kernels.COLUMNS), key, environment(device))
    for model, layout in layouts.items():
        batch = arguments.batch or batch_for(model, device)
        cases = [
            Case(host, mode, variant, batch)
            for host, mode, variant in CASES
            if host in arguments.hosts and mode in modes and variant in arguments.variants
        ]
        bench = Bench(model, layout, arguments, device)
        for _ in range(arguments.rounds):
            bench.round(cases, budget, table, profiles)
        if arguments.largest and device.type == "cuda":
            bench.largest(cases, budget, table)
    draw(arguments.csv)
    shown = ("model", "host", "variant", "mode", "batch", "median_ms", "speedup_over_compiled")
    print_table((*shown, "peak_mib", "loss", "note"), table.rows)


def batch_for(model: str, device: torch.device) -> int:
    """Return the sequences per step at which bf16-mixed fits into the card, and 1 if none does.

    It extrapolates the counted peak (benchmarks/results/memory_counted.csv): saved activations and
    workspace grow with the batch, weights and states do not.

    Args:
        model: a counted one; any other one gets 2.
        device: where it will run; a CPU gets 2, too.
    """
    counted = {"kind": "counted", "model": model, "variant": BF16, "checkpointing": "False"}
    rows = [
        r for r in read_rows(COUNTED) if all(r[column] == counted[column] for column in counted)
    ]
    if device.type != "cuda" or not rows:
        return 2
    row = {column: float(rows[0][column]) for column in (*CATEGORIES, "batch")}
    standing = row["weights"] + row["residuals"] + row["states"]
    each = (row["saved activations"] + row["workspace"]) / row["batch"]
    memory = torch.cuda.get_device_properties(device).total_memory / 2**20
    return max(1, min(MOST_SEQUENCES, math.floor((SEEN * memory - standing) / each)))


class Bench:
    """The runs of one model.

    Args:
        model: its name.
        layout: arguments of transformers.LlamaConfig.
        arguments: the command's arguments.
        device: where.
    """

    def __init__(
        self,
        model: str,
        layout: dict[str, Any],
        arguments: argparse.Namespace,
        device: torch.device,
    ) -> None:
        self.model, self.layout, self.device = model, layout, device
        self.sequence = TOY_SEQUENCE if arguments.toy else SEQUENCE
        self.steps = arguments.steps
        self.rates: Rates = measured_rates(device, toy=arguments.toy)
        self.runs: dict[Case, list[Run]] = {}
        self.notes: dict[Case, str] = {}
        self.graphs: dict[Case, dict[str, object]] = {}

    def round(self, cases: list[Case], budget: Budget, table: Table, profiles: Table) -> None:
        """Run a few steps of each case, and write its rows and kernels when it ends."""
        for case in cases:
            if case in self.notes and self.notes[case] != NOT_REACHED:
                continue
            if not budget.fits():
                self.notes.setdefault(case, NOT_REACHED)
                continue
            with budget.piece():
                self.try_run(case)
            table.add(self.rows(cases))
            profiles.add(self.kernels())
        table.add(self.rows(cases))

    def try_run(self, case: Case) -> Run | None:
        """Run a case; a failure becomes its note."""
        steps = WARMUP_STEPS + self.steps + 1  # the last one ends the one before
        tokens = bigram_tokens(steps * case.batch, self.sequence, self.layout["vocab_size"])
        run = None
        try:
            variant = VARIANTS[case.variant]
            with contextlib.ExitStack() as stack:
                stack.enter_context(graphs_counted(self.graphs.setdefault(case, {}), case.mode))
                if variant.apart:
                    stack.enter_context(layers_apart())
                run = HOSTS[case.host](
                    variant,
                    case.mode == "compiled",
                    self.layout,
                    tokens,
                    case.batch,
                    self.device,
                )
        except Exception as error:
            run, self.notes[case] = None, note_of(error)
        else:
            self.notes.pop(case, None)
            self.runs.setdefault(case, []).append(run)
        torch.compiler.reset()
        free(self.device)  # outside of the handler: its traceback holds what the run held
        return run

    def largest(self, cases: list[Case], budget: Budget, table: Table) -> None:
        """Run each case at the largest batch that fits."""
        memory = torch.cuda.get_device_properties(self.device).total_memory / 2**20 * USABLE
        for case in cases:
            if not budget.fits() or not self.runs.get(case):
                continue
            with budget.piece():
                peaks = [self._peak_at(case, batch) for batch in (1, 2)]
                if None in peaks:
                    continue
                batch = 1 + math.floor((memory - peaks[0]) / (peaks[1] - peaks[0]))
                found = None
                while batch > 2 and found is None:
                    found = self.try_run(case._replace(batch=batch))
                    batch -= 1
            table.add(self.rows([case._replace(batch=batch + 1)]))

    def _peak_at(self, case: Case, batch: int) -> float | None:
        case = case._replace(batch=batch)
        run = self.runs[case][0] if self.runs.get(case) else self.try_run(case)
        return None if run is None else run.run_peak_mib

    def kernels(self) -> list[dict[str, object]]:
        """Return the kernels of a step of each case that has run."""
        about = {"model": self.model, "sequence": self.sequence}
        return [
            {**about, **case._asdict(), **row}
            for case, runs in self.runs.items()
            for row in runs[-1].kernels
        ]

    def rows(self, cases: list[Case]) -> list[dict[str, object]]:
        """Return a row for each case that has run, or has a note."""
        return [self._row(case) for case in cases if case in self.runs or case in self.notes]

    def _row(self, case: Case) -> dict[str, object]:
        row: dict[str, object] = {"model": self.model, "sequence": self.sequence}
        row |= {**case._asdict(), "note": self.notes.get(case, "")}
        row |= self.graphs.get(case, {})
        if case not in self.runs:
            return row
        runs, variant = self.runs[case], VARIANTS[case.variant]
        samples = [ms for run in runs for ms in run.milliseconds]
        timing = timing_of([ms["step"] for ms in samples])
        stock = case._replace(variant=LORA if variant.lora else BF16)
        baseline, compiled = (self.runs.get(c) for c in (stock, stock._replace(mode="compiled")))
        tokens = case.batch * self.sequence
        for phase in PHASES:
            row[f"{phase}_ms"] = round(statistics.median(ms[phase] for ms in samples), 3)
        row |= timing.columns() | {
            "tokens_per_s": round(tokens / timing.median * 1e3),
            "peak_mib": round(max(run.peak_mib for run in runs), 1),
            "run_peak_mib": round(max(run.run_peak_mib for run in runs), 1),
            "fp8_linears": runs[-1].num_fp8_linears,
            "recipe": runs[-1].recipe,
            "loss": round(runs[-1].losses[-1], 5),
            "steps": len(samples),
        }
        if not variant.lora:
            used = _traffic(case.variant, variant, runs[-1].recipe)
            moved = variant.optimizer_bytes * parameter_count(**self.layout)
            floor = 1e3 * step_seconds(tokens, self.sequence, self.layout, self.rates, used, moved)
            row |= {"floor_ms": round(floor, 3), "floor_share": round(floor / timing.median, 3)}
        for column, others in (("speedup", baseline), ("speedup_over_compiled", compiled)):
            if others:
                theirs = [ms["step"] for run in others for ms in run.milliseconds]
                row[column] = round(timing_of(theirs).median / timing.median, 3)
        if baseline:
            row["loss_difference"] = f"{_mean_loss(runs) / _mean_loss(baseline) - 1:+.6f}"
            if baseline[0].peak_mib:
                row["peak_share"] = round(runs[0].peak_mib / baseline[0].peak_mib, 3)
        return row


def _mean_loss(runs: list[Run]) -> float:
    return statistics.mean(loss for run in runs for loss in run.losses[WARMUP_STEPS:])


def _traffic(name: str, variant: Variant, recipe: str):
    """Return the traffic of a variant's casts if its linears ran `recipe`, or None for BF16."""
    if variant.precision == FP8:
        if not recipe:  # no linear is faster in FP8
            return None
        return traffic(f"{recipe}, weights cached" if "cached" in name else recipe)
    if variant.peer == "torchao by Accelerate":
        return traffic("torchao tensorwise")
    return traffic(variant.peer) if variant.peer else None


if __name__ == "__main__":
    main()
