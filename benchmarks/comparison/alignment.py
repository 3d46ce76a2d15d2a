"""What the scripts that align a model share: prompts and answers, a model to start from, a record.

The task is that of the other examples: say what a function does. A small Llama that was made here
has only read code, so it is shown answers first, once; it is kept beside the assets. With --model
and --data nothing is made.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

import assets
from instruction_data import Example, pad, tokenize
from instruction_rows import read_rows
from script_start import Refusal

START_STEPS, START_STEPS_QUICK = 150, 120


@dataclass(frozen=True)
class Start:
    """A model that answers, and rows {"prompt": messages, "answer": text} to go on with."""

    model: str
    tokenizer: PreTrainedTokenizerBase
    train: list[dict]
    eval: list[dict]


def prepare(arguments: argparse.Namespace, answers: bool = True) -> Start:
    """Load, or first make, the model to start from and the data.

    Args:
        arguments: of `side_by_side.argument_parser`.
        answers: whether a model that is made here has to know what an answer looks like.
    Raises:
        Refusal: there are no rows whose prompt and answer are short enough.
    """
    own = None
    if arguments.model is None or arguments.data is None:
        preset = assets.QUICK if arguments.quick else assets.DEFAULT
        steps, with_model = arguments.pretraining_steps, arguments.model is None
        own = assets.prepare(preset, arguments.assets, steps, with_model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model or own.model)
    if arguments.data is not None:
        rows = short_rows(arguments.data, tokenizer, arguments)
        random.Random(0).shuffle(rows)
        count = min(arguments.eval_rows, max(1, len(rows) // 10))
        train, held_out = rows[count:], rows[:count]
    else:
        train = short_rows(own.train, tokenizer, arguments)
        held_out = short_rows(own.eval, tokenizer, arguments)
        held_out = random.Random(0).sample(held_out, min(arguments.eval_rows, len(held_out)))
    model = arguments.model or own.model
    if answers and arguments.model is None:
        steps = arguments.start_steps
        if steps is None:
            steps = START_STEPS_QUICK if arguments.quick else START_STEPS
        model = made_once(
            own.model.parent / f"answers-{steps}",
            lambda folder: _teach_answers(own.model, tokenizer, train, steps, folder),
        )
    return Start(str(model), tokenizer, train, held_out)


def short_rows(
    path: Path, tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace
) -> list[dict]:
    """Return the rows of a JSONL whose prompt and answer are not longer than asked for."""
    pairs = read_pairs(path)
    rows = pairs or [prompt_and_answer(row) for _, row in read_rows(path)]
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False) for row in rows]
    prompts, answers = (
        [len(ids) for ids in tokenizer(part, add_special_tokens=False)["input_ids"]]
        for part in (texts, [row["answer"] for row in rows])
    )
    kept = [
        row
        for row, prompt, answer in zip(rows, prompts, answers, strict=True)
        if prompt < arguments.max_prompt and answer < arguments.max_answer
    ]
    if not kept:
        raise Refusal(
            f"None of the {len(rows)} rows of {path} has a prompt of less than "
            f"{arguments.max_prompt} and an answer of less than {arguments.max_answer} tokens; "
            "choose a larger --max-prompt or --max-answer"
        )
    return kept


def read_pairs(path: Path) -> list[dict]:
    """Return rows {"chosen": ..., "rejected": ...}, with "prompt" or whole conversations, as
    {"prompt": messages, "answer": text, "worse": text}; none where they are of another kind.
    """
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError):
        return []  # `read_rows` knows more kinds of files, and says what is wrong
    if not all(isinstance(row, dict) and {"chosen", "rejected"} <= row.keys() for row in rows):
        return []
    pairs = []
    for row in rows:
        (before, better), (_, worse) = (_split(row[key]) for key in ("chosen", "rejected"))
        prompt = row.get("prompt", before)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        pairs.append({"prompt": prompt, "answer": better, "worse": worse})
    return pairs


def _split(answer: str | list[dict]) -> tuple[list[dict], str]:
    """Return what stands before an answer, and its text."""
    return ([], answer) if isinstance(answer, str) else (answer[:-1], answer[-1]["content"])


def prompt_and_answer(row: dict) -> dict:
    """Return a row of `instruction_rows` as {"prompt": messages, "answer": text}."""
    if row.get("messages"):
        return {"prompt": row["messages"][:-1], "answer": row["messages"][-1]["content"]}
    if row.get("prompt") is not None:
        question, answer = row["prompt"], row["completion"]
    else:
        parts = (row["instruction"], row.get("input"))
        question, answer = "\n\n".join(part for part in parts if part), row["output"]
    return {"prompt": [{"role": "user", "content": question}], "answer": answer}


def preferences(rows: list[dict]) -> list[dict]:
    """Return rows with a worse answer beside the true one, as conversations.

    Where the data has none, it is another row's for one half, and the true one cut short for the
    other half.
    """
    others = rows[1:] + rows[:1]
    made = []
    for i, (row, other) in enumerate(zip(rows, others, strict=True)):
        words = row["answer"].split()
        made_up = other["answer"] if i % 2 else " ".join(words[: max(1, len(words) // 2)])
        worse = row.get("worse", made_up)
        chosen, rejected = (
            [{"role": "assistant", "content": text}] for text in (row["answer"], worse)
        )
        made.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    return made


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` filled, now or earlier; a run that is killed leaves none."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        try:
            make(partial)
            with contextlib.suppress(OSError):  # another process was faster
                os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _teach_answers(
    source: Path, tokenizer: PreTrainedTokenizerBase, rows: list[dict], steps: int, folder: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    examples = [as_example(row, tokenizer) for row in rows]

    def loss_of(chosen: list[Example]) -> Tensor:
        return model(**pad(chosen, tokenizer.pad_token_id), use_cache=False).loss

    teach(model, examples, loss_of, steps, "showing it answers, once")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def teach_preferences(start: Start, rows: list[dict], steps: int, folder: Path) -> None:
    """Train a reward model on `preferences` (Bradley-Terry) and save it with its tokenizer."""
    tokenizer = start.tokenizer
    model = AutoModelForSequenceClassification.from_pretrained(
        start.model, num_labels=1, dtype=torch.float32, pad_token_id=tokenizer.pad_token_id
    )
    nn.init.zeros_(model.score.weight)  # no preference yet
    pairs = [
        tuple(
            as_example({"prompt": row["prompt"], "answer": row[key][0]["content"]}, tokenizer)
            for key in ("chosen", "rejected")
        )
        for row in preferences(rows)
    ]

    def loss_of(taken: list[tuple[Example, Example]]) -> Tensor:
        batch = pad([e for pair in zip(*taken, strict=True) for e in pair], tokenizer.pad_token_id)
        batch.pop("labels")
        better, worse = model(**batch).logits[:, 0].float().chunk(2)
        return -F.logsigmoid(better - worse).mean()

    teach(model, pairs, loss_of, steps, "training the reward model, once")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def teach(model: nn.Module, data: list, loss_of: Callable, steps: int, title: str) -> None:
    """Train all weights in float32 with AdamW on batches of 16 at random."""
    chance = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    model.train()
    bar = tqdm(range(steps), desc=title, mininterval=1.0)
    for _ in bar:
        loss = loss_of(chance.sample(data, min(16, len(data))))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{float(loss.detach()):.3f}", refresh=False)


def as_example(row: dict, tokenizer: PreTrainedTokenizerBase) -> Example:
    answer = {"role": "assistant", "content": row["answer"]}
    return tokenize({"messages": [*row["prompt"], answer]}, tokenizer)
