"""A fine-tuning run that is ready to start: what the arguments lead to."""

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
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_cosine_schedule_with_warmup,
)

import assets
from instruction_data import hold_out, load_examples, pack, pad, stack
from instruction_rows import read_rows
from run_order import RunOrder
from script_start import Refusal

ACCEPTED_MODELS = (
    "expected a folder with a causal language model and its tokenizer, as save_pretrained writes "
    "it, or the name of one on the Hugging Face Hub, as organization/model"
)


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
    """Load (or first make) the model and the data. What is quickly refused is looked at first.

    Args:
        arguments: of `argument_parser`.
    Raises:
        Refusal: a model or data that cannot be loaded, or do not go together.
    """
    length = arguments.max_length
    if arguments.model is not None:
        _check_context(model_config(arguments.model), length)
    for path in (arguments.data, arguments.eval_data):
        if path is not None:
            read_rows(path)
    own = None
    preset = assets.QUICK if arguments.quick else assets.DEFAULT
    if arguments.model is None or arguments.data is None:
        own = assets.prepare(
            preset,
            arguments.assets,
            arguments.pretraining_steps,
            with_model=arguments.model is None,
        )
    model, tokenizer = _load(arguments.model or str(own.model))

    train = load_examples(arguments.data or own.train, tokenizer, length)
    if arguments.eval_data is not None:
        evaluation = load_examples(arguments.eval_data, tokenizer, length)
    elif arguments.data is not None:
        train, evaluation = hold_out(train, 0.05, seed=0)
    else:
        count = arguments.eval_examples or preset.evaluated_examples
        evaluation = load_examples(own.eval, tokenizer, length)
        evaluation = random.Random(0).sample(evaluation, min(count, len(evaluation)))

    if arguments.batching == "packed":
        pad_token_id = _pad_token_id(tokenizer)
        train = pack(train, length, pad_token_id)
        evaluation = pack(evaluation, length, pad_token_id)
    steps = arguments.steps
    if steps is None and arguments.epochs is None and arguments.data is None:
        steps = preset.fine_tuning.updates
    epochs = 1.0 if arguments.epochs is None else arguments.epochs
    return FineTuning(arguments, model, tokenizer, train, evaluation, epochs, steps)


def model_config(name: str) -> PretrainedConfig:
    """Return the configuration of a folder, or of a model on the Hub.

    Raises:
        Refusal: there is none.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").exists():
        raise Refusal(f"--model {name}: the folder has no config.json; {ACCEPTED_MODELS}")
    if not folder.exists() and (name.count("/") > 1 or name.startswith((".", "~", "/"))):
        raise Refusal(f"--model {name}: there is no such folder; {ACCEPTED_MODELS}")
    return _from_pretrained(AutoConfig, name)


def _load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = _from_pretrained(AutoTokenizer, name)
    # Master weights in float32: what "mixed" precision means, whatever the checkpoint was saved in.
    return _from_pretrained(AutoModelForCausalLM, name, dtype=torch.float32), tokenizer


def _from_pretrained(auto, name: str, **options):
    try:
        return auto.from_pretrained(str(Path(name).expanduser()), **options)
    except (OSError, ValueError, KeyError, ImportError) as error:  # what transformers raises
        said = " ".join(str(error).split())
        said = said if len(said) <= 300 else f"{said[:300]} ..."
        raise Refusal(f"--model {name}: {said} ({auto.__name__}); {ACCEPTED_MODELS}") from None


def _check_context(config: PretrainedConfig, length: int) -> None:
    """Refuse rows of more tokens than the model has positions for."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context and length > context:
        raise Refusal(
            f"--max-length {length}: the model's context is {context} tokens; take no more"
        )


def num_targets(batch: dict[str, Tensor]) -> int:
    """Return over how many tokens the model's mean loss goes; the first position is never one."""
    return int((batch["labels"][:, 1:] != -100).sum())


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a token for padding, which is masked everywhere, so any serves a tokenizer without
    one.
    """
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    return tokenizer.eos_token_id or 0
