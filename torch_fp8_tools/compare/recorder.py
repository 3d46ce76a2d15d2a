"""`Recorder`: what one process of a trial measures, a line of JSON for each optimizer step.

It sees any loop through three points of torch: the hooks of all optimizers, ``autograd.backward``,
and the iterator of a DataLoader. The loss of a step is the sum of the scalars on which backward was
called since the last step, so hosts that divide it by the number of micro-batches give their mean.
"""

import atexit
import contextlib
import json
import math
import multiprocessing
import os
import sys
import time
import weakref
import zlib
from collections import deque
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torch_fp8_tools.compare.trial import Trial

BACKWARD = "torch_fp8_tools.compare: backward"
_FINGERPRINTS, _MOST_WAITING = 3, 64


class Recorder:
    """Records the steps of the first optimizer that steps, and ends the process after the last.

    Args:
        trial: the trial that this process belongs to.
    Attributes:
        notes: lines on what was overridden, redirected or left as it is.
        reports: conversion report of each model, by its id.
        hosts: names of the hosts' classes that the program created, and of our own function.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.notes: list[str] = []
        self.reports: dict[int, Any] = {}
        self.hosts: set[str] = set()
        self.step = 0
        self._main: weakref.ref[Optimizer] | None = None
        self._lines: list[dict[str, Any]] = []
        self._file: Any = None
        self._waiting: deque[tuple[dict[str, Any], list[Tensor], Any]] = deque()
        self._losses: list[Tensor] = []
        self._batch, self._fingerprints = 0, list[int]()
        self._data, self._tokens, self._depth = 0.0, 0, 0
        self._last, self._begun = time.perf_counter(), False
        self._event: Any = None
        self._profile: Any = None
        self._ended = False
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._wrap_backward()
        self._wrap_data_loader()
        atexit.register(self._end, "program")

    def note(self, message: str) -> None:
        """Add a line to the record, in which no two are the same."""
        self.notes.append(message)
        self._write({"note": message})

    def evaluation(self, values: dict[str, float]) -> None:
        """Record the losses of an evaluation, by name."""
        losses = {k: float(v) for k, v in values.items() if "loss" in k and _is_number(v)}
        if losses:
            self._write({"evaluation": losses, "step": self.step})

    def _begin(self) -> None:
        """Start the clock: the first batch, backward or step of the program."""
        if not self._begun:
            self._begun, self._last = True, time.perf_counter()

    def _wrap_backward(self) -> None:
        original = torch.autograd.backward

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._begin()
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if not self._depth and grad_tensors is None and all(t.numel() == 1 for t in given):
                self._losses += [t.detach() for t in given]
            self._depth += 1
            try:
                with torch.autograd.profiler.record_function(BACKWARD):
                    return original(tensors, grad_tensors, *args, **kwargs)
            finally:
                self._depth -= 1

        torch.autograd.backward = backward

    def _wrap_data_loader(self) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        original = _BaseDataLoaderIter.__next__

        def following(iterator: Any) -> Any:
            self._begin()
            began = time.perf_counter()
            batch = original(iterator)
            self._data += time.perf_counter() - began
            tokens = _tokens(batch)
            self._tokens += tokens.numel() if tokens is not None else 0
            if self.step < _FINGERPRINTS:
                self._batch = fingerprint(batch)
            return batch

        _BaseDataLoaderIter.__next__ = following

    @torch._disable_dynamo  # a compiled step calls it as it is
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._main is not None:
            return
        if self._depth:
            return  # gradient release: a step of one parameter, within backward
        self._main = weakref.ref(optimizer)
        self._begin()
        self._open()
        if not self.hosts:
            self._fail(
                "the program has no Trainer, Fabric or Accelerator that we know, so FP8 would "
                "convert no model. In a loop of its own call torch_fp8.convert_to_float8(model) "
                "and torch_fp8.convert_optimizer(optimizer, model=model) before training: a BF16 "
                "trial leaves both without effect"
            )
        if not self.trial.is_bf16 and not self.reports:
            self._fail(
                "no model was converted to FP8: the program made "
                f"{', '.join(sorted(self.hosts))}, but trains another model"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._write(
            {
                "weights": _norm(parameters),
                "trained": sum(p.numel() for p in parameters),
                "optimizer": type(optimizer).__name__,
                "device": parameters[0].device.type if parameters else "cpu",
                "card": _card(),
                "world": _world(),
                "layers": [layers_of(report) for report in self.reports.values()],
            }
        )

    @torch._disable_dynamo
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        now = time.perf_counter()
        if self._main is None or self._main() is not optimizer:
            return
        self.step += 1
        if self.step <= _FINGERPRINTS:
            self._fingerprints.append(self._batch)  # of a batch of training, not of evaluation
        row: dict[str, Any] = {
            "step": self.step,
            "seconds": now - self._last,
            "data": self._data,
            "tokens": self._tokens,
            "graphs": _graphs(),
        }
        event = None
        if torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._waiting.append((row, self._losses, (self._event, event)))
        self._losses, self._event = [], event
        self._flush(self.step >= self.trial.steps)
        self._run_profiler()
        if self.step >= self.trial.steps:
            self._end("steps")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # what follows would save, upload or evaluate
        self._data, self._tokens = 0.0, 0
        self._last = time.perf_counter()

    def _flush(self, everything: bool) -> None:
        """Write the rows whose work on the card is done: reading a loss earlier would wait."""
        while self._waiting:
            row, losses, (before, event) = self._waiting[0]
            if event is not None:
                if not everything and len(self._waiting) < _MOST_WAITING and not event.query():
                    return
                event.synchronize()
                if before is not None:
                    row["seconds"] = before.elapsed_time(event) / 1e3
            self._waiting.popleft()
            row["loss"] = sum(map(float, losses)) if losses else None
            row["profiled"] = row["step"] in self.trial.profiled
            self._write(row)

    def _run_profiler(self) -> None:
        steps = self.trial.profiled
        if not steps:
            return
        if self.step == steps.start - 1:
            from torch_fp8_tools.compare.step_profile import StepProfile

            self._profile = StepProfile(self._parameters())
        elif self._profile is not None and self.step == steps.stop - 1:
            self._flush(True)
            self._write({"profile": self._profile.stop()})
            self._profile = None

    def _parameters(self) -> list[Tensor]:
        optimizer = self._main and self._main()
        groups = optimizer.param_groups if optimizer else []
        return [p for group in groups for p in group["params"]]

    def _end(self, reason: str) -> None:
        if self._ended or self._main is None:
            return
        self._ended = True
        with contextlib.suppress(Exception):
            self._flush(True)
        end: dict[str, Any] = {"end": reason, "fingerprints": self._fingerprints}
        end["pid"] = os.getpid()
        if torch.cuda.is_initialized():
            end["peak"] = torch.cuda.max_memory_allocated()
        self._write(end)
        if reason == "steps" and _world() > 1:  # a rank that leaves early is an error of the others
            with contextlib.suppress(Exception):
                torch.distributed.barrier()

    def _fail(self, message: str) -> None:
        self._write({"error": message})
        print(f"torch-fp8 compare: {message}", file=sys.stderr, flush=True)
        os._exit(3)

    def _open(self) -> None:
        """Open the file of this rank. A second training in a rank, as of a sweep, has none."""
        rank = torch.distributed.get_rank() if _world() > 1 else int(os.environ.get("RANK", "0"))
        path = Path(self.trial.folder) / f"rank{rank}.jsonl"
        try:
            self._file = path.open("x", encoding="utf-8", buffering=1)
        except FileExistsError:
            print(
                f"torch-fp8 compare: another process is rank {rank}, so process {os.getpid()} is "
                "not recorded",
                file=sys.stderr,
            )
            self._file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        lines, self._lines = self._lines, []
        for line in lines:
            self._write(line)
        if multiprocessing.parent_process() is not None:  # it ends without `atexit`
            Finalize(None, self._end, ("program",), exitpriority=0)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            self._lines.append(line)
        else:
            self._file.write(json.dumps(line) + "\n")


def layers_of(report: Any) -> dict[str, Any]:
    """Return what a conversion report says of the layers, as JSON."""
    return {
        "converted": report.num_converted,
        "layers": report.num_layers,
        "fp8_flops": report.flops.fp8,
        "flops": report.flops.total,
        "recipe": str(report.recipe.name),
        "level": report.config.opt_level,
        "emulated": report.emulated,
        "skipped": [list(pair) for pair in report.skipped],
        "config": report.config.to_json(),
    }


def fingerprint(batch: Any) -> int:
    """Return a checksum of the first bytes of the tensors in a batch."""
    if isinstance(batch, Tensor):
        with contextlib.suppress(Exception):
            values = batch.detach().flatten()[:4096].cpu().contiguous()
            return zlib.crc32(values.view(torch.uint8).numpy().tobytes())
    if isinstance(batch, (list, tuple)):
        return zlib.crc32(repr([fingerprint(part) for part in batch]).encode())
    if hasattr(batch, "items"):
        return zlib.crc32(repr([(k, fingerprint(v)) for k, v in batch.items()]).encode())
    return zlib.crc32(repr(batch).encode()) if isinstance(batch, (str, int, float)) else 0


def _tokens(batch: Any) -> Tensor | None:
    """Return the tensor of token ids in a batch, if it has one."""
    if isinstance(batch, (list, tuple)) and batch:
        batch = batch[0]
    if hasattr(batch, "keys"):
        batch = dict(batch).get("input_ids")
    is_ids = isinstance(batch, Tensor) and batch.dtype is torch.int64 and batch.dim() == 2
    return batch if is_ids else None


def _norm(parameters: list[Tensor]) -> float | None:
    """Return the sum of the absolute values on this rank, which tells start weights apart."""
    with contextlib.suppress(Exception), torch.no_grad():
        shards = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
        return float(sum(float(p.detach().abs().sum(dtype=torch.float64)) for p in shards))
    return None


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, RuntimeError):
        return False


def _graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def _world() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def _card() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else None
