"""Assets are made once, whole or not at all."""

import dataclasses
import fcntl
import json

import assets
import fine_tuning_time
import pytest
import tiny_llama
import torch
from fine_tuning_time import StepTime, Work, step_times
from stdlib_corpus import documented_functions, is_held_out, source_files
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.internals import bf16_products

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


def test_what_was_cut_off_and_other_settings_are_made_again(tmp_path, monkeypatch):
    """What a killed run has left is removed, and what another one makes is not."""
    made_with = []

    def make(preset, folder, steps):
        (folder / "train.jsonl").write_text("half")
        made_with.append(preset)
        if len(made_with) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(assets, "_make", make)
    with pytest.raises(KeyboardInterrupt):
        assets.prepare(TINY, tmp_path)
    assert list(tmp_path.iterdir()) == []
    left, others = tmp_path / "tiny.partial-left", tmp_path / "tiny.partial-others"
    for folder in (left, others):
        folder.mkdir()
    other = dataclasses.replace(TINY, pretraining_steps=3)
    with (others / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for preset in (TINY, TINY, other, other):
            assets.prepare(preset, tmp_path)
    assert made_with == [TINY, TINY, other]
    assert not left.exists()
    assert others.exists()


@pytest.mark.parametrize(
    ("seconds", "fp8", "steps"),
    [(0.18, 1.0, 600), (0.5, 1.0, 235), (0.5, 1.5, 150), (3.0, 9.0, 120)],
    ids=["fast", "FP8 twice BF16", "FP8 three times BF16", "very slow"],
)
def test_steps_fit_into_the_time(monkeypatch, capsys, seconds, fp8, steps):
    """5 s of start-up and 35 s of making the data, then 4 more starts and two runs as measured."""
    monkeypatch.setattr(tiny_llama, "seconds_per_step", lambda *_: seconds)
    times = StepTime(0.5, 0.4, 0.2), StepTime(fp8, 0.4, 0.2)
    monkeypatch.setattr(assets, "step_times", lambda *_: times)
    monkeypatch.setattr(assets.time, "monotonic", lambda: assets.STARTED + 40)
    model = tiny_llama.build(64, 64, 1, pad_token_id=0, eos_token_id=1)
    facts = assets.fitted_steps(assets.DEFAULT, model, torch.arange(99), assets.STARTED + 5)
    assert facts["pretraining_steps"] == pytest.approx(steps, abs=2)
    printed = capsys.readouterr().out
    assert f"--pretraining-steps {facts['pretraining_steps']}" in printed
    if seconds < 1:  # under six minutes
        fine_tuning = sum(step.of(assets.DEFAULT.fine_tuning) for step in times)
        assert 40 + 4 * 5 + fine_tuning + facts["pretraining_steps"] * seconds < 345


def test_data_for_a_model_of_ones_own_needs_no_pretraining(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_llama, "pretrain", lambda *_: pytest.fail("pre-trained"))
    made = assets.prepare(TINY, tmp_path, with_model=False)
    assert made.train.exists()
    assert not made.model.exists()


def test_steps_are_measured_in_bf16_and_in_fp8():
    model = tiny_llama.build(64, 64, 1, pad_token_id=0, eos_token_id=1)
    row = torch.arange(32)[None]
    seen = []
    model.register_forward_hook(lambda *_: seen.append(type(model.model.layers[0].mlp.up_proj)))
    for step in step_times(model, {"input_ids": row, "labels": row}):
        assert 0 < step.of(Work(1, 1, 1)) == sum(dataclasses.astuple(step))
    assert [kind.__name__ for kind in seen] == ["Linear"] * 4 + ["Float8Linear"] * 4


@pytest.mark.parametrize("slowness", [1.0, 9.0])
def test_steps_are_measured_with_the_products_of_the_trials(monkeypatch, slowness):
    """BF16 products that are slow are computed in float32, and only while steps are measured."""
    calls = []
    monkeypatch.setattr(bf16_products, "slowness", lambda: slowness)
    for name in ("compute_in_float32", "restore"):
        monkeypatch.setattr(bf16_products, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(fine_tuning_time, "_measured", lambda *_, fp8: calls.append(fp8))
    step_times(None, {})
    in_float32 = slowness > bf16_products.SLOW
    expected = ["compute_in_float32", False, True, "restore"] if in_float32 else [False, True]
    assert calls == expected
