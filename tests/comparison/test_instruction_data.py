"""Masking, padding and packing, on rows of every kind."""

import json

import pytest
import torch
from code_tokenizer import train_tokenizer
from instruction_data import IGNORED, Example, hold_out, load_examples, pack, pad, stack, tokenize
from script_start import Refusal

from tests.models import llama

CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "what is a list"},
    {"role": "assistant", "content": "a sequence"},
    {"role": "user", "content": "and a set"},
    {"role": "assistant", "content": "no order"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["what is a list, and a set: a sequence, no order"] * 4, 300)


def learned(example: Example, tokenizer) -> str:
    assert all(
        label in (IGNORED, token)
        for token, label in zip(example.input_ids, example.labels, strict=True)
    )
    return tokenizer.decode([x for x in example.labels if x != IGNORED])


def test_chat_rows_learn_every_assistant_turn_and_its_end_only(tokenizer):
    example = tokenize({"messages": CHAT}, tokenizer)
    assert learned(example, tokenizer) == "a sequence<|end|>no order<|end|>"
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(example.input_ids) == rendered


def test_prompt_rows_learn_the_completion_and_the_end(tokenizer):
    example = tokenize({"prompt": "a set: ", "completion": "no order"}, tokenizer)
    assert learned(example, tokenizer) == "no order<|end|>"
    assert tokenizer.decode(example.input_ids) == "a set: no order<|end|>"


@pytest.mark.parametrize("given", ["", None, "a list"])
def test_instruction_rows_become_messages_where_there_is_a_template(tokenizer, given):
    row = {"instruction": "what is", "input": given, "output": "a sequence"}
    example = tokenize(row, tokenizer)
    assert learned(example, tokenizer) == "a sequence<|end|>"
    question = "what is\n\na list" if given else "what is"
    assert f"<|user|>{question}<|end|>" in tokenizer.decode(example.input_ids)


def test_instruction_rows_work_without_a_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    example = tokenize({"instruction": "what is a list", "output": "a sequence"}, tokenizer)
    assert tokenizer.decode(example.input_ids) == "what is a list\n\na sequence<|end|>"
    assert learned(example, tokenizer) == "a sequence<|end|>"


def test_the_prompt_is_tokenized_as_at_generation_time(tokenizer):
    row = {"prompt": "a seq", "completion": "uence"}  # one token if tokenized together
    together = tokenizer("a sequence")["input_ids"]
    example = tokenize(row, tokenizer)
    prompt = tokenizer("a seq")["input_ids"]
    assert example.input_ids[: len(prompt)] == prompt
    assert example.input_ids[:-1] != together


@pytest.mark.parametrize(
    ("template", "row", "said"),
    [
        (None, {"messages": CHAT}, "no chat template"),
        ("{{ messages[-1]['content'] }}", {"messages": CHAT}, "rewrites earlier turns"),
        ("{{ raise_exception('must alternate') }}", {"messages": CHAT}, "line 1: .*must alternate"),
        ("", {"prompt": "a list " * 50, "completion": "a sequence"}, "--max-length"),
        ("", {"messages": CHAT[:2]}, "None of the 1 rows of .*rows.jsonl has an answer"),
    ],
)
def test_rows_that_nothing_can_be_learned_of_are_refused(
    tokenizer, jsonl, monkeypatch, template, row, said
):
    if template != "":
        monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises((ValueError, Refusal), match=said):
        load_examples(jsonl([row]), tokenizer, max_length=64)


@pytest.fixture
def jsonl(tmp_path):
    def write(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_rows_that_are_too_long_are_left_out_and_counted(tokenizer, jsonl, capsys):
    short = {"prompt": "a list", "completion": "a sequence"}
    path = jsonl([short, {"prompt": "a list " * 50, "completion": "a sequence"}, short])
    assert len(load_examples(path, tokenizer, max_length=32)) == 2
    assert "1 of 3 rows left out" in capsys.readouterr().out


def test_conversations_are_learned_as_messages(tokenizer, jsonl):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    (example,) = load_examples(jsonl([{"conversations": turns}]), tokenizer, max_length=512)
    assert example == tokenize({"messages": CHAT}, tokenizer)


def examples_of(lengths: list[int]) -> list[Example]:
    """Examples whose tokens are all different and whose prompts are their first two tokens."""
    start, made = 10, []
    for length in lengths:
        ids = list(range(start, start + length))
        made.append(Example(ids, [IGNORED, IGNORED, *ids[2:]]))
        start += length
    return made


def test_hold_out_divides_the_examples():
    examples = examples_of([3] * 40)
    train, evaluation = hold_out(examples, 0.1, seed=0)
    assert len(evaluation) == 4
    firsts = sorted(e.input_ids[0] for e in train + evaluation)
    assert firsts == [e.input_ids[0] for e in examples]
    assert hold_out(examples, 0.1, seed=0) == (train, evaluation)


def test_padding_is_neither_attended_to_nor_learned():
    batch = pad(examples_of([5, 3]), pad_token_id=1)
    assert batch["input_ids"][1].tolist() == [15, 16, 17, 1, 1]
    assert batch["attention_mask"][1].tolist() == [1, 1, 1, 0, 0]
    assert batch["labels"][1].tolist() == [IGNORED, IGNORED, 17, IGNORED, IGNORED]


def test_packing_keeps_every_example_whole_and_once():
    examples = examples_of([5, 9, 3, 4, 7, 2])
    rows = pack(examples, 12, pad_token_id=1)
    assert {tuple(row[key].shape) for row in rows for key in row} == {(12,)}
    kept = torch.cat([row["input_ids"] for row in rows])
    assert sorted(kept[kept != 1].tolist()) == [i for e in examples for i in e.input_ids]
    for row in rows:
        starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], 12], strict=True):
            assert row["position_ids"][start:end].tolist() == list(range(end - start))
            assert row["labels"][start] == IGNORED
    learned = sum(int((row["labels"] != IGNORED).sum()) for row in rows)
    assert learned == sum(len(e.labels) - 2 for e in examples)


def test_packing_refuses_an_example_that_does_not_fit():
    with pytest.raises(ValueError, match="13 tokens does not fit into a row of 12"):
        pack(examples_of([13]), 12, pad_token_id=1)


def test_packed_examples_do_not_see_each_other():
    """Their logits are those of each example alone."""
    model = llama(hidden_size=32, intermediate_size=48).eval()
    examples = examples_of([9, 6, 5, 8])
    batch = stack(pack(examples, 20, pad_token_id=1))
    assert batch["input_ids"].shape == (2, 20)
    with torch.no_grad():
        packed = model(**batch, use_cache=False).logits
        for example in examples:
            ids = torch.tensor([example.input_ids])
            row, start = (batch["input_ids"] == example.input_ids[0]).nonzero()[0].tolist()
            alone = model(input_ids=ids).logits[0]
            torch.testing.assert_close(packed[row, start : start + ids.shape[1]], alone)
