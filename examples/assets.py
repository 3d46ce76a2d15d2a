"""Everything that the examples need when they are given nothing, made once and kept on disk.

    <cache>/<preset>/model/        a pre-trained Llama and its tokenizer, for `from_pretrained`
    <cache>/<preset>/train.jsonl   {"messages": [user: a function, assistant: its docstring]}
    <cache>/<preset>/eval.jsonl    the same, from files that the model and train.jsonl never saw
    <cache>/<preset>/made_from.json

All of it comes from the standard library's sources. The folder is built beside its final place
and renamed when it is complete: a run that was killed half-way leaves nothing that a later run
would mistake for it.
"""

import json
import math
import os
import platform
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import tiny_llama
from code_tokenizer import END, train_tokenizer
from stdlib_corpus import documented_functions, is_held_out, source_files

DOCSTRING_CHARACTERS = range(20, 301)


@dataclass(frozen=True)
class Preset:
    """How much of the library is read, and how large a model is made of it."""

    name: str
    files_one_in: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    pretraining_steps: int
    pretraining_batch: int
    pretraining_length: int
    max_function_characters: int


DEFAULT = Preset(
    name="default",
    files_one_in=1,
    vocab_size=4096,
    hidden_size=256,
    num_layers=4,
    pretraining_steps=1000,
    pretraining_batch=8,
    pretraining_length=128,
    max_function_characters=600,
)
QUICK = Preset(
    name="quick",
    files_one_in=4,
    vocab_size=1024,
    hidden_size=128,
    num_layers=2,
    pretraining_steps=200,
    pretraining_batch=8,
    pretraining_length=128,
    max_function_characters=600,
)


@dataclass(frozen=True)
class Assets:
    model: Path
    train: Path
    eval: Path


def prepare(preset: Preset, cache: Path) -> Assets:
    """Return the assets; make them first unless `cache` holds them, from the same settings."""
    folder = cache / preset.name
    made_from = {**asdict(preset), "python": platform.python_version()}
    if not _is_made(folder, made_from):
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{preset.name}.partial-", dir=cache))
        try:
            _make(preset, partial)
            (partial / "made_from.json").write_text(json.dumps(made_from, indent=2))
            _put_in_place(partial, folder, made_from)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return Assets(folder / "model", folder / "train.jsonl", folder / "eval.jsonl")


def _is_made(folder: Path, made_from: dict) -> bool:
    try:
        return json.loads((folder / "made_from.json").read_text()) == made_from
    except (OSError, json.JSONDecodeError):
        return False


def _put_in_place(partial: Path, folder: Path, made_from: dict) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # made from other settings, or by hand
    try:
        os.replace(partial, folder)
    except OSError:  # another process was faster
        if not _is_made(folder, made_from):
            raise


def _make(preset: Preset, folder: Path) -> None:
    started = time.perf_counter()
    files = source_files(one_in=preset.files_one_in)
    texts = [path.read_text(encoding="utf-8") for path in files if not is_held_out(path)]
    tokenizer = train_tokenizer(texts, preset.vocab_size)
    stream = [i for ids in tokenizer([text + END for text in texts])["input_ids"] for i in ids]
    print(
        f"Making a small model and its data once, in {folder.parent}: {len(texts)} files of the "
        f"standard library, {len(stream):,} tokens, a vocabulary of {len(tokenizer):,}"
    )

    _write_instructions(preset, files, folder)
    torch.manual_seed(0)
    model = tiny_llama.build(
        len(tokenizer),
        preset.hidden_size,
        preset.num_layers,
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    loss = tiny_llama.pretrain(
        model,
        torch.tensor(stream),
        preset.pretraining_steps,
        preset.pretraining_batch,
        preset.pretraining_length,
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    print(
        f"  model: {model.num_parameters() / 1e6:.1f} million parameters, pre-training loss "
        f"{loss:.2f} (chance: {math.log(len(tokenizer)):.2f}); "
        f"{time.perf_counter() - started:.0f} s in all"
    )


def _write_instructions(preset: Preset, files: list[Path], folder: Path) -> None:
    seen: set[tuple[str, str]] = set()
    for name, held_out in (("train", False), ("eval", True)):
        rows = []
        for path in (path for path in files if is_held_out(path) == held_out):
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
