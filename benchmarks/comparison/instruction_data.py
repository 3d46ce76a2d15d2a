"""Instruction data: rows of `instruction_rows` -> token ids and labels -> padded or packed batches.

Messages are rendered with the tokenizer's chat template; a prompt and its completion are taken as
they are, then end-of-sequence; an instruction becomes messages if there is a chat template.

Labels are the token ids where the model is to learn (what the assistant says, and its end token)
and -100 elsewhere. A prompt and its answer are tokenized apart, because at generation time the
model sees the prompt's tokens alone.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jinja2 import TemplateError
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from instruction_rows import as_messages, read_rows
from script_start import Refusal

IGNORED = -100  # torch.nn.functional.cross_entropy's ignore_index


@dataclass(frozen=True)
class Example:
    """One conversation: token ids, and labels of the same length."""

    input_ids: list[int]
    labels: list[int]


def load_examples(
    path: Path | str, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[Example]:
    """Read a file of rows; those of more than `max_length` tokens are left out, and counted aloud.

    Raises:
        Refusal: the file or a row is malformed (see `instruction_rows.read_rows`), a chat template
            cannot be split into prompts and answers, or no row is short enough and has an answer.
    """
    rows = read_rows(path)
    examples = []
    for place, row in tqdm(rows, desc=f"tokenizing {Path(path).name}", delay=2.0, leave=False):
        try:
            examples.append(tokenize(row, tokenizer))
        except (Refusal, TemplateError) as error:
            said = error if isinstance(error, Refusal) else f"the chat template says: {error}"
            raise Refusal(f"{path}, {place}: {said}") from None
    answered = [e for e in examples if any(x != IGNORED for x in e.labels)]
    kept = [e for e in answered if len(e.input_ids) <= max_length]
    if not answered:
        raise Refusal(
            f"None of the {len(rows)} rows of {path} has an answer to learn: a message of the role "
            "'assistant' (from 'gpt'), a 'completion' or an 'output' that is not empty"
        )
    if not kept:
        shortest = min(len(e.input_ids) for e in answered)
        raise Refusal(
            f"None of the {len(rows)} rows of {path} fits into {max_length} tokens, the shortest "
            f"has {shortest}; choose a larger --max-length"
        )
    for count, why in (
        (len(examples) - len(answered), "without an answer to learn"),
        (len(answered) - len(kept), f"of more than {max_length} tokens (--max-length)"),
    ):
        if count:
            print(f"{path}: {count} of {len(rows)} rows left out, {why}")
    return kept


def hold_out(
    examples: list[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Split at random into (training, evaluation), at least one example each."""
    if len(examples) < 2:
        raise Refusal("One example cannot be split into training and evaluation; give --eval-data")
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
    row = as_messages(row)
    if row.get("messages"):
        yield from _chat_segments(row["messages"], tokenizer)
    elif row.get("prompt") is not None:
        yield (tokenizer.bos_token or "") + row["prompt"], False
        yield row["completion"] + (tokenizer.eos_token or ""), True
    else:
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


def _chat_segments(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, bool]]:
    if not tokenizer.chat_template:
        raise Refusal(
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
            raise Refusal(
                "This chat template rewrites earlier turns when a turn is added, so answers cannot "
                "be told from prompts; use one assistant turn per row, or prompt/completion rows"
            )
        yield prompt[len(done) :], False
        yield answered[len(prompt) :], True
        done = answered
