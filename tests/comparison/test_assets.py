"""Assets are made once, whole or not at all."""

import dataclasses
import fcntl
import json
import math
import time

import assets
import fine_tuning
import pytest
import tiny_llama
import torch
from fine_tuning_time import StepTime, Work
from sft_arguments import argument_parser
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


@pytest.mark.long
def test_they_are_not_made_twice(made, monkeypatch):
    monkeypatch.setattr(assets, "_make", lambda *_: pytest.fail("made again"))
    assert assets.prepare(TINY, made.model.parents[1]) == made


def test_what_was_cut_off_is_made_again(tmp_path, monkeypatch):
    def cut_off(preset, folder, steps):
        (folder / "train.jsonl").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(assets, "_make", cut_off)
        with pytest.raises(KeyboardInterrupt):
            assets.prepare(TINY, tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(assets, "_make", lambda _, folder, steps: (folder / "eval.jsonl").touch())
    made = assets.prepare(TINY, tmp_path)
    assert made.eval.exists()
    assert not made.train.exists()


def test_other_settings_are_made_again(tmp_path, monkeypatch):
    made_with = []
    monkeypatch.setattr(assets, "_make", lambda preset, *_: made_with.append(preset))
    other = dataclasses.replace(TINY, pretraining_steps=3)
    for preset in (TINY, TINY, other, other):
        assets.prepare(preset, tmp_path)
    assert made_with == [TINY, other]


def test_what_a_killed_run_left_is_removed_and_what_another_makes_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "_make", lambda *_: {})
    left, others = tmp_path / "tiny.partial-left", tmp_path / "tiny.partial-others"
    for folder in (left, others):
        folder.mkdir()
        (folder / "train.jsonl").write_text("half")
    with (others / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = assets.prepare(TINY, tmp_path)
    assert not left.exists()
    assert others.exists()
    assert sorted(path.name for path in made.model.parent.iterdir()) == ["made_from.json"]


@pytest.mark.parametrize(
    ("seconds", "fp8", "steps"),
    [(0.18, 1.0, 600), (0.5, 1.0, 302), (0.5, 1.5, 202), (3.0, 9.0, 120)],
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
    if seconds < 1:  # under eight minutes
        fine_tuning = sum(step.of(assets.DEFAULT.fine_tuning) for step in times)
        assert 40 + 4 * 5 + fine_tuning + facts["pretraining_steps"] * seconds < 440


@pytest.mark.long
def test_the_number_of_steps_is_kept_with_the_model(tmp_path, monkeypatch):
    """Another moment would have fitted another one."""
    seconds = iter([1e9, 1e-9])
    monkeypatch.setattr(tiny_llama, "seconds_per_step", lambda *_: next(seconds))
    monkeypatch.setattr(tiny_llama, "pretrain", lambda *_: 5.0)
    made = [assets.prepare(TINY, tmp_path) for _ in range(2)]
    made_from = json.loads((made[1].model.parent / "made_from.json").read_text())
    assert made_from["pretraining_steps"] == TINY.fewest_steps
    assets.prepare(TINY, tmp_path, TINY.fewest_steps)  # what is there
    assets.prepare(TINY, tmp_path, 7)
    made_from = json.loads((made[1].model.parent / "made_from.json").read_text())
    assert made_from["pretraining_steps"] == 7


@pytest.mark.long
def test_a_preset_says_what_its_fine_tuning_does(assets_cache):
    arguments = argument_parser("").parse_args(["--quick", "--assets", str(assets_cache)])
    run = fine_tuning.prepare(arguments)
    steps, evaluations = run.steps(1), 1 + math.ceil(run.steps(1) / arguments.eval_every)
    done = Work(steps * arguments.accumulate, steps, evaluations * len(run.eval_loader()))
    assert done == assets.QUICK.fine_tuning
    assert arguments.max_length == assets.FINE_TUNING_TOKENS


def test_timing_steps_leaves_the_model_and_the_random_state_alone(monkeypatch):
    model = tiny_llama.build(64, 64, 1, pad_token_id=0, eos_token_id=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assets.fitted_steps(TINY, model, torch.arange(64).repeat(40), time.monotonic())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_data_for_a_model_of_ones_own_needs_no_pretraining(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_llama, "pretrain", lambda *_: pytest.fail("pre-trained"))
    made = assets.prepare(TINY, tmp_path, with_model=False)
    assert made.train.exists()
    assert not made.model.exists()


def test_pretraining_lowers_the_loss():
    torch.manual_seed(0)
    model = tiny_llama.build(64, 64, 1, pad_token_id=0, eos_token_id=1)
    stream = torch.arange(64).repeat(40)
    loss = tiny_llama.pretrain(model, stream, 40, 4, 32)
    assert loss < 2.0  # chance: log 64 = 4.2


def test_pretraining_in_float32_begins_as_in_bf16():
    stream, losses = torch.arange(64).repeat(40), []
    for autocast in (False, True):
        torch.manual_seed(0)
        model = tiny_llama.build(64, 64, 1, pad_token_id=0, eos_token_id=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(tiny_llama.pretrain(model, stream, 1, 4, 32, bar=False))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] != losses[1]
