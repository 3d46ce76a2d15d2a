"""The model and data that the examples use by default, made once and kept on disk.

    <cache>/<preset>/model/        a pre-trained Llama and its tokenizer, for `from_pretrained`
    <cache>/<preset>/train.jsonl   {"messages": [user: a function, assistant: its docstring]}
    <cache>/<preset>/eval.jsonl    the same, from files that the model and train.jsonl never saw
    <cache>/<preset>/made_from.json

All of it comes from the standard library's sources. The folder is built under another name and
renamed when it is complete, so a later run never uses the folder of a killed run, but removes it.

Unless you set the number of pre-training steps, it depends on the machine: a few steps of
pre-training, and of fine-tuning in both precisions, are timed, and as many follow as leave
time for fine-tuning. made_from.json has the number; all runs of a cache start from one model.
"""

import contextlib
import copy
import fcntl
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import tiny_llama
from code_tokenizer import END, train_tokenizer
from fine_tuning_time import Work, step_times
from script_start import STARTED
from stdlib_corpus import documented_functions, is_held_out, source_files

DOCSTRING_CHARACTERS = range(20, 301)
FINE_TUNING_TOKENS = 512
"""The tokens of a row of fine-tuning."""


@dataclass(frozen=True)
class Preset:
    """The share of the library to read, and the size of the model to train on it.

    Attributes:
        pretraining_steps: the maximum number of pre-training steps.
        fewest_steps: the minimum number, however slow the machine is.
        total_seconds: the time for everything: pre-training, and fine-tuning in two precisions.
        fine_tuning: the size of each of the two fine-tuning runs, with the repetition in BF16 and
            a micro-batch of 512 tokens.
        evaluated_examples: the number of examples that a fine-tuning run evaluates.
    """

    name: str
    files_one_in: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    pretraining_steps: int
    fewest_steps: int
    pretraining_batch: int
    pretraining_length: int
    max_function_characters: int
    total_seconds: float
    fine_tuning: Work
    evaluated_examples: int


DEFAULT = Preset(
    name="default",
    files_one_in=1,
    vocab_size=4096,
    hidden_size=256,
    num_layers=4,
    pretraining_steps=600,
    fewest_steps=120,
    pretraining_batch=8,
    pretraining_length=128,
    max_function_characters=600,
    total_seconds=340.0,
    fine_tuning=Work(micro_batches=85, updates=40, evaluations=8),
    evaluated_examples=96,
)
QUICK = Preset(
    name="quick",
    files_one_in=4,
    vocab_size=1024,
    hidden_size=128,
    num_layers=2,
    pretraining_steps=200,
    fewest_steps=100,
    pretraining_batch=8,
    pretraining_length=128,
    max_function_characters=600,
    total_seconds=110.0,
    fine_tuning=Work(micro_batches=90, updates=30, evaluations=8),
    evaluated_examples=24,
)


@dataclass(frozen=True)
class Assets:
    model: Path
    train: Path
    eval: Path


def prepare(
    preset: Preset, cache: Path, pretraining_steps: int | None = None, with_model: bool = True
) -> Assets:
    """Return the assets; make them first unless `cache` holds them, from the same settings.

    Args:
        preset: sizes of the assets.
        cache: the folder that keeps it.
        pretraining_steps: number of steps, or None for those of an existing model, or else as many
            as there is time for.
        with_model: whether the model and its tokenizer are needed, which take most of the time.
    """
    folder = cache / (preset.name if with_model else f"{preset.name}-data")
    settings = {**asdict(preset), "python": platform.python_version()}
    if not _is_made(folder, settings, pretraining_steps):
        cache.mkdir(parents=True, exist_ok=True)
        with _partial_folder(cache, preset.name) as partial:
            facts = _make(preset, partial, pretraining_steps) if with_model else {}
            if not with_model:
                _write_instructions(preset, source_files(one_in=preset.files_one_in), partial)
            made_from = {"settings": settings, **(facts or {})}
            (partial / "made_from.json").write_text(json.dumps(made_from, indent=2))
            _put_in_place(partial, folder, settings)
    return Assets(folder / "model", folder / "train.jsonl", folder / "eval.jsonl")


def _is_made(folder: Path, settings: dict, pretraining_steps: int | None = None) -> bool:
    try:
        made_from = json.loads((folder / "made_from.json").read_text())
    except (OSError, json.JSONDecodeError):
        return False
    if made_from.get("settings") != settings:
        return False
    return pretraining_steps in (None, made_from.get("pretraining_steps"))


@contextlib.contextmanager
def _partial_folder(cache: Path, name: str) -> Iterator[Path]:
    """A locked folder that is removed afterwards, as are those of killed processes."""
    for left in cache.glob("*.partial-*"):
        with contextlib.suppress(OSError), (left / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: somebody is making it
            shutil.rmtree(left, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=cache))
    try:
        with (partial / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, folder: Path, settings: dict) -> None:
    (partial / "lock").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # made from other settings, or by hand
    try:
        os.replace(partial, folder)
    except OSError:  # another process was faster
        if not _is_made(folder, settings):
            raise


def _make(preset: Preset, folder: Path, pretraining_steps: int | None) -> dict:
    began = time.monotonic()
    print(f"Making a small model and its data once, in {folder.parent}", flush=True)
    files = source_files(one_in=preset.files_one_in)
    texts = [path.read_text(encoding="utf-8") for path in files if not is_held_out(path)]
    print(f"  {len(texts)} files of the standard library: training a tokenizer", flush=True)
    tokenizer = train_tokenizer(texts, preset.vocab_size, show_progress=True)
    stream: list[int] = []
    for start in _bar(range(0, len(texts), 32), "tokenizing"):
        ended = [text + END for text in texts[start : start + 32]]
        stream += [i for ids in tokenizer(ended)["input_ids"] for i in ids]
    print(f"  {len(stream):,} tokens, a vocabulary of {len(tokenizer):,}", flush=True)

    _write_instructions(preset, files, folder)
    torch.manual_seed(0)
    model = tiny_llama.build(
        len(tokenizer),
        preset.hidden_size,
        preset.num_layers,
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    tokens = torch.tensor(stream)
    facts = {"pretraining_steps": pretraining_steps}
    if pretraining_steps is None:
        facts = fitted_steps(preset, model, tokens, began)
    loss = tiny_llama.pretrain(
        model,
        tokens,
        facts["pretraining_steps"],
        preset.pretraining_batch,
        preset.pretraining_length,
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    print(
        f"  model: {model.num_parameters() / 1e6:.1f} million parameters, pre-training loss "
        f"{loss:.2f} (chance: {math.log(len(tokenizer)):.2f}); "
        f"{time.monotonic() - began:.0f} s in all",
        flush=True,
    )
    return facts


def fitted_steps(
    preset: Preset, model: tiny_llama.LlamaForCausalLM, tokens: torch.Tensor, began: float
) -> dict:
    """Time a few steps of each kind; return how many of pre-training fit, and the seconds of one.

    Args:
        model: stays unchanged.
        tokens: training tokens.
        began: time.monotonic() when `prepare` began.
    """
    batch, length = preset.pretraining_batch, preset.pretraining_length
    seconds = tiny_llama.seconds_per_step(copy.deepcopy(model), tokens, batch, length)
    fine_tuning = 0.0
    if not torch.cuda.is_available():  # a GPU fine-tunes in little time
        row = tokens[None, :FINE_TUNING_TOKENS]
        times = step_times(copy.deepcopy(model), {"input_ids": row, "labels": row})
        fine_tuning = sum(step.of(preset.fine_tuning) for step in times)
    start = began - STARTED  # of Python and its imports, once more for each precision
    spent = time.monotonic() - STARTED
    rest = fine_tuning + 4 * start
    left = preset.total_seconds - spent - rest
    steps = round(min(max(left / seconds, preset.fewest_steps), preset.pretraining_steps))
    print(
        f"  a pre-training step takes {seconds:.2f} s here: {steps} steps, "
        f"about {_minutes(steps * seconds)}. With fine-tuning in two precisions "
        f"everything from here is expected to take about {_minutes(steps * seconds + rest)}.\n"
        f"  The number is kept with the model; --pretraining-steps {steps} makes it again.",
        flush=True,
    )
    return {"pretraining_steps": steps, "seconds_per_step": round(seconds, 4)}


def _bar(items: Sequence, description: str) -> Iterable:
    """Show a progress bar if it takes more than two seconds."""
    return tqdm(items, desc=description, delay=2.0, mininterval=1.0, leave=False)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} minutes"


def _write_instructions(preset: Preset, files: list[Path], folder: Path) -> None:
    seen: set[tuple[str, str]] = set()
    for name, held_out in (("train", False), ("eval", True)):
        rows = []
        part = [path for path in files if is_held_out(path) == held_out]
        for path in _bar(part, f"looking for functions for {name}.jsonl"):
            rows += _instructions(path, preset.max_function_characters, seen)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"  {name}.jsonl: {len(rows)} functions with their docstrings")


def _instructions(path: Path, max_characters: int, seen: set[tuple[str, str]]) -> list[dict]:
    rows = []
    for code, docstring in documented_functions(path):
        if len(code) > max_characters or len(docstring) not in DOCSTRING_CHARACTERS:
            continue
        if (code, docstring) in seen:
            continue
        seen.add((code, docstring))
        question = {"role": "user", "content": f"Describe this function.\n\n{code}"}
        rows.append({"messages": [question, {"role": "assistant", "content": docstring}]})
    return rows
