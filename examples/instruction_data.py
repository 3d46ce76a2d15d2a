"""Instruction data: JSONL rows -> token ids and labels -> padded or packed batches.

Three kinds of rows are understood, told apart by their keys:

    {"messages": [{"role": ..., "content": ...}, ...]}  rendered with the tokenizer's chat template
    {"prompt": ..., "completion": ...}                  taken as they are, then end-of-sequence
    {"instruction": ..., "input": ..., "output": ...}   as messages if there is a chat template

Labels are the token ids where the model is to learn (what the assistant says, and its end token)
and -100 elsewhere. A prompt and its answer are tokenized apart, because at generation time the
model sees the prompt's tokens alone.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import load_dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

IGNORED = -100  # torch.nn.functional.cross_entropy's ignore_index


@dataclass(frozen=True)
class Example:
    """One conversation: token ids, and labels of the same length."""

    input_ids: list[int]
    labels: list[int]


def load_examples(
    path: Path | str, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[Example]:
    """Read a JSONL file; rows of more than `max_length` tokens are left out, and counted aloud.

    Raises:
        ValueError: a row has none of the known sets of keys, a chat template cannot be split into
            prompts and answers, or no row is short enough.
    """
    rows = load_dataset("json", data_files=str(path), split="train")
    examples = [tokenize(row, tokenizer) for row in rows]
    kept = [
        e
        for e in examples
        if len(e.input_ids) <= max_length and any(x != IGNORED for x in e.labels)
    ]
    if not kept:
        raise ValueError(
            f"None of the {len(examples)} rows of {path} fits into {max_length} tokens and has an "
            "answer; choose a larger --max-length"
        )
    if len(kept) < len(examples):
        print(
            f"{path}: {len(examples) - len(kept)} of {len(examples)} rows left out "
            f"(over {max_length} tokens, or without an answer)"
        )
    return kept


def hold_out(
    examples: list[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Split at random into (training, evaluation), at least one example each."""
    if len(examples) < 2:
        raise ValueError(
            "One example cannot be split into training and evaluation; give --eval-data"
        )
    shuffled = random.Random(seed).sample(examples, len(examples))
    num_eval = min(max(1, round(fraction * len(examples))), len(examples) - 1)
    return shuffled[num_eval:], shuffled[:num_eval]


def tokenize(row: dict, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Return the row's tokens; labels are -100 wherever the model only reads."""
    input_ids: list[int] = []
    labels: list[int] = []
    for text, is_answer in _segments(row, tokenizer):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        input_ids += ids
        labels += ids if is_answer else [IGNORED] * len(ids)
    if labels:
        labels[0] = IGNORED  # nothing precedes it, in a packed row not even its own conversation
    return Example(input_ids, labels)


def pad(examples: Sequence[Example], pad_token_id: int) -> dict[str, Tensor]:
    """Return one example per row, filled on the right.

    Returns:
        input_ids, attention_mask and labels, each (B, longest) int64.
    """
    longest = max(len(e.input_ids) for e in examples)

    def fill(rows: list[list[int]], value: int) -> Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    return {
        "input_ids": fill([e.input_ids for e in examples], pad_token_id),
        "attention_mask": fill([[1] * len(e.input_ids) for e in examples], 0),
        "labels": fill([e.labels for e in examples], IGNORED),
    }


def pack(
    examples: Sequence[Example], length: int, pad_token_id: int, open_rows: int = 64
) -> list[dict[str, Tensor]]:
    """Put several examples into each row of exactly `length` tokens.

    First fit, over the last `open_rows` rows. `position_ids` start at 0 with every example and
    there is no attention mask: transformers takes each restart as a new document and lets no token
    attend across it (block-diagonal mask, or variable-length flash attention). What is left of a
    row is a document of padding without labels.

    Returns:
        rows of input_ids, position_ids and labels, each (length,) int64.
    """
    rows: list[list[Example]] = []
    space: list[int] = []
    for example in examples:
        needed = len(example.input_ids)
        if needed > length:
            raise ValueError(f"An example of {needed} tokens does not fit into a row of {length}")
        for i in range(max(0, len(rows) - open_rows), len(rows)):
            if space[i] >= needed:
                break
        else:
            i = len(rows)
            rows.append([])
            space.append(length)
        rows[i].append(example)
        space[i] -= needed
    filler = [Example([pad_token_id] * left, [IGNORED] * left) for left in space]
    return [_row([*row, fill]) for row, fill in zip(rows, filler, strict=True)]


def stack(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch of packed rows: each value (B, length)."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _row(examples: list[Example]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor([i for e in examples for i in e.input_ids]),
        "position_ids": torch.tensor([i for e in examples for i in range(len(e.input_ids))]),
        "labels": torch.tensor([i for e in examples for i in e.labels]),
    }


def _segments(row: dict, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Yield the row's text in order, in pieces (text, whether the model is to learn it)."""
    if row.get("messages"):
        yield from _chat_segments(row["messages"], tokenizer)
    elif isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        yield (tokenizer.bos_token or "") + row["prompt"], False
        yield row["completion"] + (tokenizer.eos_token or ""), True
    elif isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        question = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        if tokenizer.chat_template:
            user = {"role": "user", "content": question}
            yield from _chat_segments(
                [user, {"role": "assistant", "content": row["output"]}], tokenizer
            )
        else:
            yield from _segments(
                {"prompt": question + "\n\n", "completion": row["output"]}, tokenizer
            )
    else:
        raise ValueError(
            f"A row with the keys {sorted(row)}: expected text under 'messages', under 'prompt' "
            "and 'completion', or under 'instruction' and 'output'"
        )


def _chat_segments(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, bool]]:
    if not tokenizer.chat_template:
        raise ValueError(
            "The data is chat-style and the tokenizer has no chat template; take an "
            "instruction-tuned model, or prompt/completion rows"
        )

    def render(turns: list[dict], **options: bool) -> str:
        return tokenizer.apply_chat_template(turns, tokenize=False, **options)

    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:i], add_generation_prompt=True)
        answered = render(messages[: i + 1])
        if not (prompt.startswith(done) and answered.startswith(prompt)):
            raise ValueError(
                "This chat template rewrites earlier turns when a turn is added, so answers cannot "
                "be told from prompts; use one assistant turn per row, or prompt/completion rows"
            )
        yield prompt[len(done) :], False
        yield answered[len(prompt) :], True
        done = answered
