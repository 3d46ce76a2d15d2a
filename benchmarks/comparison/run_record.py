"""What a training run leaves behind for people and for the comparison: losses.csv and result.json.

Written by the training script itself, from tensors and classes that any model has.
"""

import csv
import json
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from losses import read_losses
from memory_count import bytes_by_kind, bytes_per_parameter

COLUMNS = ["step", "loss", "eval_loss", "seconds"]
MEASURED = ["device", "linear_layers", "bytes_per_parameter", "bytes_by_kind", "parameters"]


class RunRecord:
    """Losses by optimizer step, in `folder`/losses.csv, one row written at a time.

    Args:
        folder: made if it does not exist.
        resume_at: keep what an earlier run recorded up to this step and drop what it did beyond.
            0: start empty.
        write: whether this process is the one that writes (rank zero).
    """

    def __init__(self, folder: Path, resume_at: int = 0, write: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.write = write
        self.facts = self._earlier_facts() if resume_at else {}
        self.path = folder / "losses.csv"
        self.rows = (
            [row for row in read_losses(self.path) if row["step"] <= resume_at] if resume_at else []
        )
        self._before = max((row["seconds"] for row in self.rows), default=0.0)
        self._started = time.perf_counter()
        if not write:
            return
        if not resume_at:
            (folder / "result.json").unlink(missing_ok=True)  # an earlier run's
        with self.path.open("w", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writeheader()
        for row in self.rows:
            self._append(row)

    def train(self, step: int, loss: float) -> None:
        self._add({"step": step, "loss": loss})

    def evaluation(self, step: int, loss: float) -> None:
        self._add({"step": step, "eval_loss": loss})

    def measure(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Count linear layers and bytes per parameter once, between a step and `zero_grad`."""
        if self.facts:
            return
        linears = Counter(type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear))
        self.facts = {
            "device": next(model.parameters()).device.type,
            "linear_layers": dict(linears),
            "bytes_per_parameter": bytes_per_parameter(model, optimizer),
            "bytes_by_kind": bytes_by_kind(model, optimizer),
            "parameters": sum(p.numel() for p in model.parameters()),
        }

    def finish(self, **facts: str | int | float) -> dict:
        """Write and return result.json: first and last losses, what was measured, and `facts`."""
        losses = [row["loss"] for row in self.rows if "loss" in row]
        evaluations = [row["eval_loss"] for row in self.rows if "eval_loss" in row]
        last = losses[-max(1, len(losses) // 10) :]
        result = {
            **facts,
            **self.facts,
            "steps": self.rows[-1]["step"],
            "final_train_loss": sum(last) / len(last),  # over the last tenth of the steps
            "first_eval_loss": evaluations[0],
            "final_eval_loss": evaluations[-1],
            "seconds": self.rows[-1]["seconds"],
        }
        if self.write:
            (self.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        return result

    def _earlier_facts(self) -> dict:
        """Return what a complete run measured; one that was cut off measures again."""
        path = self.folder / "result.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        return {name: result[name] for name in MEASURED if name in result}

    def _add(self, row: dict) -> None:
        row["seconds"] = round(self._before + time.perf_counter() - self._started, 2)
        self.rows.append(row)
        self._append(row)

    def _append(self, row: dict) -> None:
        if not self.write:
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
