"""What a run that aligns a model leaves behind: curves.csv and result.json, with memory counted.

Nothing here knows in which precision it runs: `torch_fp8.memory_report` counts the tensors of any
model, and `live_bytes` whatever is alive.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_fp8
from accelerate import Accelerator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, PrinterCallback, Trainer, TrainerCallback

from alignment import as_example
from instruction_data import pad
from runs import write
from side_by_side import KINDS

COUNTED_STEPS = 4
"""The steps at which memory is counted, which takes a moment; all states exist after the first."""


class HeldOut:
    """How well a model knows the answers of held-out rows, and how far it is from another one."""

    def __init__(self, rows: list[dict], tokenizer: PreTrainedTokenizerBase) -> None:
        examples = [as_example(row, tokenizer) for row in rows]
        pad_token_id = tokenizer.pad_token_id
        self.batches = [pad(examples[i : i + 16], pad_token_id) for i in range(0, len(rows), 16)]

    @torch.no_grad()
    def __call__(self, model: nn.Module, reference: Callable) -> dict[str, float]:
        """Return means over the answers' tokens.

        Args:
            model: prepared by Accelerate, so that it runs in its precision.
            reference: what is called like it, and gives the logits to compare with.
        Returns:
            eval_loss: nats; accuracy: of the likeliest token; eval_kl: KL(model, reference), nats.
        """
        training = model.training
        model.eval()
        sums = dict.fromkeys(("eval_loss", "accuracy", "eval_kl"), 0.0)
        total = 0
        for batch in self.batches:
            batch = {name: value.to(_device(model)) for name, value in batch.items()}
            labels = batch.pop("labels")[:, 1:]
            wanted = labels != -100
            ours, theirs = (
                F.log_softmax(m(**batch, use_cache=False).logits[:, :-1][wanted].float(), dim=-1)
                for m in (model, reference)
            )
            labels = labels[wanted]
            sums["eval_loss"] += float(F.nll_loss(ours, labels, reduction="sum"))
            sums["accuracy"] += float((ours.argmax(-1) == labels).sum())
            sums["eval_kl"] += float((ours.exp() * (ours - theirs)).sum())
            total += len(labels)
        model.train(training)
        return {name: value / total for name, value in sums.items()}


class Record:
    """What a run leaves behind: curves.csv, and result.json with last values and memory.

    Args:
        folder: made if it does not exist.
        write: whether this process is the one that writes (rank zero).
    """

    def __init__(self, folder: Path, write: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.write = folder, write
        self.rows: dict[int, dict] = {}
        self.memory: dict[str, dict[str, int]] = {}
        self.live: dict[str, int] = {}
        self._started = time.perf_counter()

    def add(self, step: int, **values: float) -> None:
        """Note values of a step, which are columns of curves.csv."""
        self.rows.setdefault(step, {"step": step}).update(values)

    def count_memory(
        self, point: str, models: dict[str, nn.Module], optimizer: torch.optim.Optimizer
    ) -> None:
        """Count the bytes that exist at a point of the loop, by model, and of all that lives.

        The largest counts of a run are kept.
        """
        for role, model in models.items():
            sizes = bytes_by_kind(model, optimizer)
            known = self.memory.setdefault(role, dict.fromkeys(KINDS, 0))
            self.memory[role] = {kind: max(known[kind], sizes[kind]) for kind in KINDS}
        self.live[point] = max(self.live.get(point, 0), live_bytes())
        self.frozen = bytes_per_frozen_parameter(models.values(), optimizer)
        self.parameters = {
            role: sum(p.numel() for p in model.parameters()) for role, model in models.items()
        }

    def finish(self, arguments: argparse.Namespace, accelerator: Accelerator) -> dict:
        """Write both files and return what result.json holds."""
        rows = [self.rows[step] for step in sorted(self.rows)]
        columns = dict.fromkeys(name for row in rows for name in row)
        result = {
            "precision": accelerator.mixed_precision,
            "device": accelerator.device.type,
            "seed": arguments.seed,
            "bf16_products": arguments.bf16_products,
            "steps": rows[-1]["step"],
            "final": {name: _last([r[name] for r in rows if name in r]) for name in columns},
            "memory": self.memory,
            "live": self.live,
            "parameters": self.parameters,
            "frozen_bytes_per_parameter": self.frozen,
            "seconds": round(time.perf_counter() - self._started, 1),
        }
        if self.write:
            lines = [{name: row.get(name) for name in columns} for row in rows]
            write(self.folder / "curves.csv", lines)
            (self.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        return result


def trainer_options(arguments: argparse.Namespace) -> dict[str, object]:
    """Return what TRL's configurations here have in common: one log a step, no checkpoints."""
    steps = arguments.steps or (30 if arguments.quick else 40)
    return {
        "learning_rate": arguments.learning_rate,
        "output_dir": str(arguments.output),
        "max_steps": steps,
        "per_device_train_batch_size": arguments.batch_size,
        "lr_scheduler_type": "cosine",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "seed": arguments.seed,
    }


def bytes_by_kind(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of a model's tensors, by the kinds of `side_by_side.KINDS`.

    Scales count with what they belong to: the weights of a model that is not trained, the moments
    of one that is.
    """
    parameters = list(model.parameters())
    trained = trained_parameters(optimizer)
    whole = torch_fp8.memory_report(model, optimizer)
    frozen = torch_fp8.memory_report(model, parameters=[p for p in parameters if p not in trained])
    return {
        "frozen weights": frozen.weights + frozen.scales,
        "trained weights": whole.weights - frozen.weights,
        "residuals": whole.master,
        "moments": whole.moments + whole.scales - frozen.scales,
        "gradients": whole.gradients,
        "caches": whole.caches,
    }


def bytes_per_frozen_parameter(models: Iterable[nn.Module], optimizer: Optimizer) -> float:
    """Return how many bytes a weight takes in the linear layers that nobody trains."""
    trained = trained_parameters(optimizer)
    counted, size = 0, 0
    for model in models:
        weights = [
            layer.weight
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer.weight not in trained
            if name.rpartition(".")[2] not in ("lm_head", "score")
        ]
        report = torch_fp8.memory_report(model, parameters=weights)
        counted += report.num_params
        size += report.weights + report.scales
    return size / max(1, counted)


def trained_parameters(optimizer: Optimizer) -> set[Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}


def live_bytes() -> int:
    """Return the bytes of all storages that Python can reach a tensor of, each once.

    What autograd alone keeps for backward is not seen.
    """
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), Tensor) or hasattr(thing, "__tensor_flatten__"):
            continue  # what is made of other tensors has no storage of its own
        if isinstance(thing, FakeTensor):
            continue  # a shape alone
        if thing.device.type != "meta" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Watch(TrainerCallback):
    """Has a Trainer of TRL keep a Record: what it logs, held-out answers, memory, and a bar.

    Args:
        trainer: whose progress is shown.
        record: gets what it logs under the names of `logged`.
        models: role -> model, asked when training begins.
        logged: key of the Trainer's logs -> column of the record.
        measure: what to compute at an evaluation and at both ends, from nothing.
        every: steps from one measurement to the next.
    """

    def __init__(
        self,
        trainer: Trainer,
        record: Record,
        models: Callable[[], dict[str, nn.Module]],
        logged: dict[str, str],
        measure: Callable[[], dict[str, float]],
        every: int,
    ) -> None:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)
        self.trainer, self.record, self.models = trainer, record, models
        self.logged, self.measure, self.every = logged, measure, every

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.bar = tqdm(
            total=state.max_steps, mininterval=1.0, disable=not state.is_world_process_zero
        )
        self.record.add(0, **self.measure())

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        self._count("before the step")

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._count("after the step")
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.record.add(state.global_step, **self.measure())
        self.bar.update()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        values = {name: float(logs[key]) for key, name in self.logged.items() if key in logs}
        if values:
            self.record.add(state.global_step, **values)
            self.bar.set_postfix({name: f"{value:.3f}" for name, value in values.items()})

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.bar.close()

    def _count(self, point: str) -> None:
        if self.trainer.state.global_step < COUNTED_STEPS:
            self.record.count_memory(point, self.models(), self.trainer.optimizer)


def train_recorded(
    trainer: Trainer,
    arguments: argparse.Namespace,
    models: Callable[[], dict[str, nn.Module]],
    logged: dict[str, str],
    measure: Callable[[], dict[str, float]],
) -> dict[str, object]:
    """Train, save the model to <output>/model and return the run's result.

    Args:
        trainer: a Trainer of TRL.
        arguments: those of the script.
        models, logged, measure: see `Watch`, which measures about six times.
    """
    record = Record(arguments.output, trainer.is_world_process_zero())
    Watch(trainer, record, models, logged, measure, every=max(1, trainer.args.max_steps // 6))
    trainer.train()
    trainer.save_model(str(arguments.output / "model"))
    return record.finish(arguments, trainer.accelerator)


def _last(values: list[float]) -> float:
    """Return the mean of the last fifth, which is the last one where there are few."""
    last = values[-max(1, len(values) // 5) :]
    return sum(last) / len(last)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
