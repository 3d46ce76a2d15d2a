"""The batches for an analysis of a model: from a text or JSONL file, or random tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MOST_CHARACTERS = 4_000_000
"""The maximum number of characters read from a file; a few batches need no more."""


def random_batches(vocab_size: int, count: int, rows: int, length: int, seed: int) -> list[Tensor]:
    """Return `count` batches (rows, length) of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (rows, length), generator=generator) for _ in range(count)]


def batches_of_file(
    path: Path, tokenizer: Any, count: int, rows: int, length: int, field: str
) -> list[Tensor]:
    """Return batches (rows, length) of a file's tokens, fewer if the file is too short.

    Args:
        path: a text file, or JSONL (by the name's ending) whose objects have the text in `field`.
        tokenizer: the model's tokenizer.
        count: the maximum number of batches.
        rows, length: the sequences of a batch, and the tokens of a sequence.
        field: the name of the text field in JSONL.
    Raises:
        ValueError: the file cannot be read, is not JSONL, has no such field, or too few tokens.
    """
    tokens: list[int] = []
    for text in _texts(path, field):
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) >= count * rows * length:
            break
    if len(tokens) < length:
        raise ValueError(
            f"{str(path)!r} has {len(tokens)} tokens, fewer than one sequence of {length}; use a "
            "longer file, or a smaller --sequence"
        )
    sequences = torch.tensor(tokens[: len(tokens) // length * length], dtype=torch.int64).view(
        -1, length
    )
    return list(sequences[: count * rows].split(rows))


def _texts(path: Path, field: str) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            content = file.read(_MOST_CHARACTERS)
            is_cut = bool(file.read(1))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"DATA {str(path)!r} cannot be read as text: {error}") from error
    if path.suffix not in (".jsonl", ".json", ".ndjson"):
        yield content
        return
    lines = content.splitlines()
    for number, line in enumerate(lines[:-1] if is_cut else lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{str(path)!r}, line {number}, is not valid JSON: {error}") from error
        text = value.get(field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            has = ", ".join(map(repr, value)) if isinstance(value, dict) else repr(value)[:60]
            raise ValueError(
                f"{str(path)!r}, line {number}, has no text field {field!r} (it has {has}); set "
                "the field with --field"
            )
        yield text
