"""Assets are made once, whole or not at all."""

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
    pretraining_steps=2,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return assets.prepare(TINY, tmp_path_factory.mktemp("assets"))


def test_they_open_with_transformers(made):
    model = AutoModelForCausalLM.from_pretrained(made.model)
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    assert model.config.vocab_size == len(tokenizer) == 300
    assert model.dtype == torch.float32
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert ids == "<|user|>x<|end|>"


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


def test_they_are_not_made_twice(made, monkeypatch):
    monkeypatch.setattr(assets, "_make", lambda *_: pytest.fail("made again"))
    assert assets.prepare(TINY, made.model.parents[1]) == made


def test_what_was_cut_off_is_made_again(tmp_path, monkeypatch):
    def cut_off(preset, folder):
        (folder / "train.jsonl").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(assets, "_make", cut_off)
        with pytest.raises(KeyboardInterrupt):
            assets.prepare(TINY, tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(assets, "_make", lambda _, folder: (folder / "eval.jsonl").touch())
    made = assets.prepare(TINY, tmp_path)
    assert made.eval.exists()
    assert not made.train.exists()


def test_other_settings_are_made_again(tmp_path, monkeypatch):
    made_with = []
    monkeypatch.setattr(assets, "_make", lambda preset, _: made_with.append(preset))
    other = dataclasses.replace(TINY, pretraining_steps=3)
    for preset in (TINY, TINY, other, other):
        assets.prepare(preset, tmp_path)
    assert made_with == [TINY, other]


def test_pretraining_lowers_the_loss():
    torch.manual_seed(0)
    model = tiny_llama.build(64, 64, 1, pad_token_id=0, eos_token_id=1)
    stream = torch.arange(64).repeat(40)
    loss = tiny_llama.pretrain(model, stream, 40, 4, 32)
    assert loss < 2.0  # chance: log 64 = 4.2
