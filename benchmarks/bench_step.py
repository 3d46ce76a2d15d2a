"""One fine-tuning step of the Llama-3.2-1B layout through the real Lightning Trainer.

    python benchmarks/bench_step.py            # on a GPU; benchmarks/results/step.csv
    python benchmarks/bench_step.py --toy      # a tiny model, also on a CPU

bf16-mixed against fp8-mixed, eager and with the decoder layers compiled, in one process: each round
runs a few steps of every variant in turn. Random weights (transformers.LlamaConfig), random tokens,
one sequence of 4096 per step, fused AdamW, no checkpoint, no logger. The loss is the mean over the
measured steps: a sanity check that both train, not a comparison of quality.
"""

import argparse
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from measurement import (
    ENVIRONMENT,
    RESULTS,
    default_device,
    environment,
    print_table,
    timing_of,
    write_rows,
)
from shapes import LLAMA_3_2_1B, SEQUENCE, TOY_LLAMA, TOY_SEQUENCE
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from torch_fp8 import Float8Linear

COLUMNS = (
    "model",
    "precision",
    "mode",
    "batch",
    "sequence",
    "median_ms",
    "p20_ms",
    "p80_ms",
    "tokens_per_s",
    "speedup",
    "peak_mib",
    "fp8_linears",
    "loss",
    "steps",
    "note",
    *ENVIRONMENT,
)
PRECISIONS = ("bf16-mixed", "fp8-mixed")
WARMUP_STEPS = 3  # of each round: compilation, allocator and optimizer state


class CausalLM(lightning.LightningModule):
    """A causal language model that trains on its own random tokens."""

    def __init__(self, config: LlamaConfig, compiled: bool) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)
        self.compiled = compiled

    def on_train_start(self) -> None:
        """Compile layer by layer, after the precision plugin has converted them."""
        if self.compiled:
            for layer in self.model.model.layers:
                layer.compile()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        fused = next(self.parameters()).device.type == "cuda"
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=fused)


class StepTimer(Callback):
    """Milliseconds and loss of each step after the warm-up, synchronized with the device."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self.losses: list[float] = []
        self.num_fp8_linears = 0
        self._began = 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self._synchronize(module)
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self._synchronize(module)
        self.num_fp8_linears = sum(isinstance(m, Float8Linear) for m in module.modules())
        if batch_idx >= WARMUP_STEPS:
            self.milliseconds.append((time.perf_counter() - self._began) * 1e3)
            self.losses.append(float(outputs["loss"]))

    @staticmethod
    def _synchronize(module: lightning.LightningModule) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="a tiny model, eager only")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step")
    parser.add_argument("--steps", type=int, default=8, help="measured steps per round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"))
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--csv", type=Path, default=RESULTS / "step.csv")
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.steps, arguments.rounds = 2, 1
    modes = arguments.modes or (("eager",) if arguments.toy else ("eager", "compiled"))
    device = default_device()
    rows = list(measure(arguments, modes, device))
    about = environment(device)
    write_rows(arguments.csv, COLUMNS, [row | about for row in rows])
    columns = ("precision", "mode", "median_ms", "tokens_per_s", "speedup", "peak_mib", "note")
    print_table(columns, rows)


def measure(
    arguments: argparse.Namespace, modes: tuple[str, ...], device: torch.device
) -> Iterator[dict[str, object]]:
    """A row per precision and mode."""
    layout = TOY_LLAMA if arguments.toy else LLAMA_3_2_1B
    sequence = TOY_SEQUENCE if arguments.toy else SEQUENCE
    start = time.monotonic()
    timers: dict[tuple[str, str], list[StepTimer]] = {}
    peaks: dict[tuple[str, str], float] = {}
    notes: dict[tuple[str, str], str] = {}
    variants = [(precision, mode) for mode in modes for precision in PRECISIONS]
    slowest = 0.0
    for _ in range(arguments.rounds):
        for variant in variants:
            began = time.monotonic()
            if variant in notes or (
                variant in timers and began - start > arguments.budget - slowest
            ):
                continue
            try:
                timer, peak = run(*variant, layout, sequence, arguments, device)
            except Exception as error:  # whatever a variant cannot do here becomes its row's note
                notes[variant] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                continue
            timers.setdefault(variant, []).append(timer)
            peaks[variant] = max(peaks.get(variant, 0.0), peak)
            slowest = max(slowest, time.monotonic() - began)
    medians = {
        variant: timing_of([ms for timer in rounds for ms in timer.milliseconds])
        for variant, rounds in timers.items()
    }
    for variant in variants:
        precision, mode = variant
        row = {"model": "toy" if arguments.toy else "Llama-3.2-1B layout", "precision": precision}
        row |= {"mode": mode, "batch": arguments.batch, "sequence": sequence}
        row["note"] = notes.get(variant, "")
        if variant in medians:
            timing, baseline = medians[variant], medians.get(("bf16-mixed", mode))
            losses = [loss for timer in timers[variant] for loss in timer.losses]
            row |= {
                "median_ms": round(timing.median, 2),
                "p20_ms": round(timing.p20, 2),
                "p80_ms": round(timing.p80, 2),
                "tokens_per_s": round(arguments.batch * sequence / timing.median * 1e3),
                "speedup": round(baseline.median / timing.median, 3) if baseline else "",
                "peak_mib": round(peaks[variant], 1),
                "fp8_linears": timers[variant][-1].num_fp8_linears,
                "loss": round(sum(losses) / len(losses), 4),
                "steps": len(losses),
            }
        yield row


def run(
    precision: str,
    mode: str,
    layout: dict[str, object],
    sequence: int,
    arguments: argparse.Namespace,
    device: torch.device,
) -> tuple[StepTimer, float]:
    """A few steps of a fresh model -> (times and losses, peak memory in MiB)."""
    lightning.seed_everything(0, verbose=False)
    with device:  # a billion random numbers take a minute on a CPU
        module = CausalLM(LlamaConfig(**layout), compiled=mode == "compiled")
    num_steps = WARMUP_STEPS + arguments.steps
    tokens = torch.randint(layout["vocab_size"], (num_steps * arguments.batch, sequence))
    timer = StepTimer()
    trainer = lightning.Trainer(
        precision=precision,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_steps=num_steps,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=arguments.batch))
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0
    del module, trainer
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return timer, peak


if __name__ == "__main__":
    main()
