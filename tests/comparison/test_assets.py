import dataclasses
import json

import assets
import pytest
import tiny_llama
import torch
from stdlib_corpus import documented_functions, is_held_out, source_files
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY = dataclasses.replace(
    assets.QUICK,
    name="tiny",
    files_one_in=24,
    vocab_size=300,
    hidden_size=64,
    num_layers=1,
    pretraining_steps=4,
    fewest_steps=2,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return assets.prepare(TINY, tmp_path_factory.mktemp("assets"), 2)


@pytest.mark.long
def test_they_open_with_transformers(made):
    model = AutoModelForCausalLM.from_pretrained(made.model)
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    assert model.config.vocab_size == len(tokenizer) == 300
    assert model.dtype == torch.float32
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert ids == "<|user|>x<|end|>"


@pytest.mark.long
def test_evaluation_is_from_files_that_training_never_saw(made):
    train, evaluation = (
        {row["messages"][0]["content"] for row in map(json.loads, path.open())}
        for path in (made.train, made.eval)
    )
    assert train
    assert evaluation
    assert not train & evaluation
    held_out = [path for path in source_files(one_in=24) if is_held_out(path)]
    codes = {code for path in held_out for code, _ in documented_functions(path)}
    assert {question.split("\n\n", 1)[1] for question in evaluation} <= codes


def test_data_for_a_model_of_ones_own_needs_no_pretraining(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_llama, "pretrain", lambda *_: pytest.fail("pre-trained"))
    made = assets.prepare(TINY, tmp_path, with_model=False)
    assert made.train.exists()
    assert not made.model.exists()
