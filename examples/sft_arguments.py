"""The command line of the two fine-tuning scripts, and what it leads to: a model and batches."""

import argparse
import math
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_cosine_schedule_with_warmup,
)

import assets
from instruction_data import hold_out, load_examples, pack, pad, stack
from run_order import RunOrder

# For the model and the data that the script makes itself.
OWN_STEPS, OWN_EVAL_EXAMPLES = 80, 160
OWN_STEPS_QUICK, OWN_EVAL_EXAMPLES_QUICK = 40, 24


def argument_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        help="a folder or name for from_pretrained; none: a small Llama, made once under --assets",
    )
    add(
        "--data",
        type=Path,
        help="JSONL, chat-style or prompt/completion; none: made from the standard library",
    )
    add("--eval-data", type=Path, help="JSONL for the evaluation; none: 5 %% of --data, at random")
    add(
        "--output",
        type=Path,
        help="folder for checkpoints, losses and the final model; none: runs/<script>",
    )
    add(
        "--assets",
        type=Path,
        default=Path("runs/assets"),
        help="where what the script makes for itself is kept",
    )
    add("--quick", action="store_true", help="smaller model and shorter run, under two minutes")
    add(
        "--batching",
        choices=["packed", "padded"],
        default="packed",
        help="several examples to a row, or one",
    )
    add(
        "--max-length",
        type=int,
        default=512,
        help="tokens in a packed row, and in the longest example",
    )
    add("--batch-size", type=int, default=1, help="rows of a micro-batch, per process")
    add("--accumulate", type=int, default=2, help="micro-batches to an optimizer step")
    add(
        "--epochs",
        type=float,
        help="passes over the data; none: 1, on the script's own data 80 steps",
    )
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--learning-rate", type=float, default=5e-4, help="peak of the cosine schedule")
    add(
        "--warmup",
        type=float,
        default=0.05,
        help="share of the steps in which the learning rate rises",
    )
    add("--weight-decay", type=float, default=0.01)
    add("--clip", type=float, default=1.0, help="norm to which gradients are clipped")
    add(
        "--eval-every",
        type=int,
        default=20,
        help="optimizer steps from one evaluation and checkpoint to the next",
    )
    add("--seed", type=int, default=0, help="of the order of the data")
    add("--resume", action="store_true", help="go on from the last checkpoint in --output")
    return parser


@dataclass
class FineTuning:
    """A run that is ready to start: model, tokenizer, data, and the number of optimizer steps."""

    arguments: argparse.Namespace
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train_data: Dataset
    eval_data: Dataset
    epochs: float
    fixed_steps: int | None

    def steps(self, num_processes: int) -> int:
        """Return the run's optimizer steps: as given, or what makes --epochs of the data."""
        if self.fixed_steps is not None:
            return self.fixed_steps
        arguments = self.arguments
        rows_per_step = arguments.batch_size * arguments.accumulate * num_processes
        return math.ceil(self.epochs * len(self.train_data) / rows_per_step)

    def schedule(self, optimizer: torch.optim.Optimizer, num_processes: int) -> LambdaLR:
        """Return a linear warm-up and a cosine to zero, to be stepped with the optimizer."""
        steps = self.steps(num_processes)
        warmup = round(self.arguments.warmup * steps)
        return get_cosine_schedule_with_warmup(optimizer, warmup, steps)

    def train_loader(
        self, num_processes: int, rank: int | None = None, start: int = 0
    ) -> DataLoader:
        """Return the micro-batches of the whole run.

        Args:
            num_processes: how many share the data.
            rank: this process, for its own share. None: everybody's, for a host that deals them.
            start: how many of its batches a process had read before the run was resumed.
        """
        size = self.arguments.batch_size
        samples = self.steps(num_processes) * self.arguments.accumulate * size
        if rank is None:
            samples, rank, num_processes = samples * num_processes, 0, 1
        order = RunOrder(
            len(self.train_data), samples, self.arguments.seed, start * size, rank, num_processes
        )
        return DataLoader(self.train_data, size, sampler=order, collate_fn=self._collate)

    def eval_loader(self) -> DataLoader:
        return DataLoader(self.eval_data, self.arguments.batch_size, collate_fn=self._collate)

    @property
    def _collate(self):
        if self.arguments.batching == "packed":
            return stack
        return partial(pad, pad_token_id=_pad_token_id(self.tokenizer))


def prepare(arguments: argparse.Namespace) -> FineTuning:
    """Load (or first make) the model and the data.

    Args:
        arguments: of `argument_parser`.
    Raises:
        ValueError: see instruction_data.load_examples.
    """
    preset = assets.QUICK if arguments.quick else assets.DEFAULT
    own = None
    if arguments.model is None or arguments.data is None:
        own = assets.prepare(preset, arguments.assets)
    name = arguments.model or own.model
    tokenizer = AutoTokenizer.from_pretrained(name)
    # Master weights in float32: what "mixed" precision means, whatever the checkpoint was saved in.
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)

    length = arguments.max_length
    train = load_examples(arguments.data or own.train, tokenizer, length)
    if arguments.eval_data is not None:
        evaluation = load_examples(arguments.eval_data, tokenizer, length)
    elif arguments.data is not None:
        train, evaluation = hold_out(train, 0.05, seed=0)
    else:
        own_eval = OWN_EVAL_EXAMPLES_QUICK if arguments.quick else OWN_EVAL_EXAMPLES
        evaluation = load_examples(own.eval, tokenizer, length)
        evaluation = random.Random(0).sample(evaluation, min(own_eval, len(evaluation)))

    if arguments.batching == "packed":
        pad_token_id = _pad_token_id(tokenizer)
        train = pack(train, length, pad_token_id)
        evaluation = pack(evaluation, length, pad_token_id)
    steps = arguments.steps
    if steps is None and arguments.epochs is None and arguments.data is None:
        steps = OWN_STEPS_QUICK if arguments.quick else OWN_STEPS
    epochs = 1.0 if arguments.epochs is None else arguments.epochs
    return FineTuning(arguments, model, tokenizer, train, evaluation, epochs, steps)


def num_targets(batch: dict[str, Tensor]) -> int:
    """Return over how many tokens the model's mean loss goes; the first position is never one."""
    return int((batch["labels"][:, 1:] != -100).sum())


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Padding is masked everywhere, so any token serves a tokenizer that has none for it."""
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    return tokenizer.eos_token_id or 0
