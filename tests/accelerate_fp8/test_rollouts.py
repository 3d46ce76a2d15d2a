import importlib.util
import math
import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("trl")

from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from tests.accelerate_fp8.test_trl_frozen import lab as lab
from tests.internals import (
    LogprobDifference,
    SampledLogprobs,
    preparation_of,
    rollouts,
    sampled_mask,
    warning_of,
)
from tests.internals import accelerate_register as _register
from torch_fp8 import Float8Linear

MEAN, ERROR = "fp8/logprob_difference", "fp8/logprob_multiplicative_error"


@pytest.fixture
def said(monkeypatch):
    texts: list[str] = []
    monkeypatch.setattr(rollouts, "warn_once", texts.append)
    return texts


def rows_with(trainer, key):
    return [row for row in trainer.state.log_history if key in row]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "peft", "args"),
    [
        ("grpo", False, {}),
        pytest.param(
            *("grpo", True, {"num_iterations": 2, "steps_per_generation": 2}),
            marks=pytest.mark.smoke,
        ),
        ("rloo", True, {}),
    ],
    ids=["grpo", "several steps", "rloo"],
)
def test_the_difference_is_logged(lab, said, kind, peft, args):
    args = {"max_completion_length": 8, "logging_steps": 1, **args}
    trainer = lab.make(kind, peft, args)
    trainer.train()
    rows = rows_with(trainer, MEAN)
    assert len(rows) == (1 if "num_iterations" in args else 2)  # each rollout is measured once
    for row in rows:
        assert 0 <= row[MEAN] < 0.02
        assert row[ERROR] == pytest.approx(math.exp(row[MEAN]))
    assert said == []
    assert all("sampling_per_token_logps" not in b for b in trainer._buffered_inputs)


def test_it_is_what_the_trainer_sampled_and_scored(lab, monkeypatch):
    seen: list[tuple[Any, ...]] = []
    add = LogprobDifference.add

    def spy(self, sampled, scored, mask):
        seen.append((sampled, scored, mask))
        add(self, sampled, scored, mask)

    monkeypatch.setattr(LogprobDifference, "add", spy)
    trainer = lab.make("grpo", False, {"max_completion_length": 8, "max_steps": 1})
    sampled_with: list[Any] = []
    original = LlamaForCausalLM.generate

    def generate(self, *given, **kwargs):
        kwargs["generation_config"].output_logits = True
        kwargs["generation_config"].return_dict_in_generate = True
        made = original(self, *given, **kwargs)
        sampled_with.append((made.sequences[:, -len(made.logits) :], torch.stack(made.logits, 1)))
        return made.sequences

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    trainer.train()
    (sampled, scored, mask), (tokens, logits) = seen[0], sampled_with[0]
    chances = logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    real = mask.bool()
    order = [0, 1] if torch.allclose(sampled[real], chances[real], atol=1e-5) else [1, 0]
    assert torch.allclose(sampled[real], chances[order][real], atol=1e-5)  # TRL shuffles them
    rows = rows_with(trainer, MEAN)
    assert rows[0][MEAN] == pytest.approx((sampled - scored)[real].abs().mean().item(), rel=1e-4)


@pytest.mark.parametrize("chunk", [None, 3])
def test_sampled_logprobs_are_those_of_the_logits(tiny_model, chunk):
    """Whatever else is forwarded before; padding is on the left, and one sequence ends early."""
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    ids = torch.randint(4, 64, (3, 7))
    attention = torch.ones_like(ids)
    ids[1, :3], attention[1, :3] = 1, 0
    watch = SampledLogprobs(0.7)
    with watch.watching(model):
        model.generate(ids, max_new_tokens=2, eos_token_id=None)
        made = model.generate(
            **{"input_ids": ids, "attention_mask": attention, "max_new_tokens": 6},
            **{"do_sample": True, "temperature": 0.7, "top_k": 0, "prefill_chunk_size": chunk},
            **{"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None},
        )
    new = made.sequences[:, 7:]
    want = (torch.stack(made.logits, 1).float() / 0.7).log_softmax(-1)
    want = want.gather(-1, new[..., None]).squeeze(-1)
    completions = [row.tolist() for row in new]
    completions[2] = completions[2][:4]
    got = watch.of(completions)
    assert got is not None
    assert [len(row) for row in got] == [6, 6, 4]
    for row, ours in enumerate(got):
        torch.testing.assert_close(torch.tensor(ours), want[row, : len(ours)])
    assert watch.of([[9] * 6, *completions[1:]]) is None  # of tokens that nobody sampled
    assert watch.of(completions[:2]) is None


def test_delayed_scaling_records_nothing_of_a_rollout_and_weights_are_cast_once(lab, monkeypatch):
    """The history would hold amaxes of single tokens alone after a thousand of them."""
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipe": "delayed"}')
    trainer = lab.make("grpo", False, {"max_completion_length": 8, "max_steps": 2})
    original = type(trainer)._generate_single_turn
    recorded: list[bool] = []

    def histories():
        layers = [m for m in trainer.model.modules() if isinstance(m, Float8Linear)]
        return [layer.scaling_state[0].clone() for layer in layers]

    def spy(self, *args, **kwargs):
        before = histories()
        made = original(self, *args, **kwargs)
        recorded.append(not all(map(torch.equal, before, histories())))
        assert all(m.training for m in trainer.model.modules() if isinstance(m, Float8Linear))
        return made

    monkeypatch.setattr(type(trainer), "_generate_single_turn", spy)
    trainer.train()
    assert recorded == [False, False]
    assert any(bool(h.any()) for h in histories())


def test_a_run_without_fp8_is_left_alone(lab, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = lab.make("grpo", False, {"max_steps": 1})
    trainer.train()
    assert not rows_with(trainer, MEAN)
    assert "_fp8_rollouts" not in vars(trainer)


def test_another_version_of_trl_is_told_of(lab, said):
    trainer = lab.make("grpo", False, {"max_steps": 1})

    class GRPOTrainer:
        accelerator, model = trainer.accelerator, trainer.model

        def log(self, logs): ...

    module = types.ModuleType("trl.trainer.grpo_trainer")
    vars(module)["GRPOTrainer"] = GRPOTrainer
    _register.extend(module)
    other = GRPOTrainer()
    other.log({})
    assert said == [
        "FP8: fp8/logprob_difference is not measured: the methods of this version of TRL are not "
        "supported"
    ]


def test_warnings_name_the_way_out():
    assert not warning_of(0.026, ["delayed"], use_vllm=False)
    assert not warning_of(0.009, ["tensorwise"], use_vllm=False)
    text = warning_of(0.015, ["tensorwise"], use_vllm=False)
    assert "above 1.01: recipe 'tensorwise' has one scale" in text
    text = warning_of(0.07, ["tensorwise"], use_vllm=False)
    assert "multiplicative_error=1.073, above 1.01: recipe 'tensorwise' has one scale" in text
    assert "recipe='rowwise'" in text
    text = warning_of(0.07, ["blockwise", "rowwise"], use_vllm=False)
    assert "a different precision or mode" in text
    assert "recipe" not in text.split("above")[1]
    assert "the engine that generates them" in warning_of(0.07, ["rowwise"], use_vllm=True)


def test_sums_leave_out_what_is_not_known_or_not_sampled():
    difference = LogprobDifference()
    sampled = torch.tensor([[-1.0, float("nan"), -2.0], [-1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    scored = torch.tensor([[-1.5, -1.0, -2.0], [-1.0, -1.25, -9.0], [-9.0, -9.0, -9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    alone = types.SimpleNamespace(device="cpu", gather=lambda x: x)
    difference.add(sampled, scored, mask)
    assert difference.take(alone) == pytest.approx(0.75 / 4)
    assert difference.take(alone) is None


def test_tokens_of_tools_are_not_compared():
    mask = torch.tensor([[1, 1, 1, 0]])
    assert torch.equal(sampled_mask({"completion_mask": mask}), mask)
    assert torch.equal(sampled_mask({"completion_mask": mask, "tool_mask": None}), mask)
    both = {"completion_mask": mask, "tool_mask": torch.tensor([[1, 0, 1, 1]])}
    assert sampled_mask(both).tolist() == [[1, 0, 1, 0]]


def test_all_turns_of_a_rollout_with_tools_are_compared():
    ones = torch.ones(1, 3)
    trainer = types.SimpleNamespace(model=types.SimpleNamespace(training=True), use_vllm=False)

    def original(self):
        vars(self)["_fp8_rollouts"].sampled = [[-2.0]]  # those of the last turn
        return {
            **{"completion_ids": ones, "completion_mask": ones},
            "tool_mask": torch.tensor([[1, 0, 1]]),
            "sampling_per_token_logps": torch.tensor([[-1.0, 0.0, -2.0]]),
            "old_per_token_logps": torch.tensor([[-1.0, -9.0, -1.0]]),
        }

    output = rollouts.generate_and_score_completions(original, trainer)
    assert "sampling_per_token_logps" not in output
    alone = types.SimpleNamespace(device="cpu", gather=lambda x: x)
    assert vars(trainer)["_fp8_rollouts"].differences["train"].take(alone) == 0.5


def test_a_warning_is_given_once(lab, said, monkeypatch):
    monkeypatch.setattr("accelerate_fp8.logprob_difference.BATCH_BOUND", 1.0)
    # What auto takes here, rowwise, has nothing to warn of.
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipe": "tensorwise"}')
    trainer = lab.make("grpo", False, {"max_completion_length": 8, "logging_steps": 1})
    trainer.train()
    assert len(rows_with(trainer, MEAN)) == 2
    assert len(said) == 1
    assert "above 1.0" in said[0]


def recipe_of(monkeypatch, recipe):
    monkeypatch.setenv("TORCH_FP8_CONFIG", f'{{"recipe": "{recipe}"}}')


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "named", "runs"),
    [
        ("grpo", "", "rowwise"),
        ("rloo", "", "rowwise"),
        ("grpo", "blockwise", "blockwise"),
        ("sft", "", "tensorwise"),
    ],
)
def test_auto_is_a_recipe_per_token_where_the_policy_samples(lab, monkeypatch, kind, named, runs):
    lines: list[str] = []
    monkeypatch.setattr("accelerate_fp8.accelerator.log_visibly", lines.append)
    if named:
        recipe_of(monkeypatch, named)
    trainer = lab.make(kind, False, {"max_steps": 1})
    trainer.train()
    layers = [m for m in trainer.model.modules() if isinstance(m, Float8Linear)]
    assert {layer.fp8.recipe.name for layer in layers} == {runs}
    chosen = [line for line in lines if "rowwise in a trainer that samples" in line]
    assert len(chosen) == (runs == "rowwise")


def test_a_search_that_makes_accelerators_keeps_the_recipe(accelerate, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")

    @dataclass
    class Arguments(TrainingArguments):
        temperature: float = 1.0
        max_new_tokens: int = 8

    arguments = Arguments(str(tmp_path), use_cpu=True, report_to=[], bf16=True)
    trainer = Trainer(nn.Linear(32, 32), arguments)
    for _ in range(2):
        preparation = preparation_of(trainer.accelerator)
        assert preparation is not None
        assert preparation.config.recipe == "rowwise"
        trainer.create_accelerator_and_postprocess()  # as with the second set of hyperparameters


def test_the_arguments_of_trainers_that_sample_have_a_temperature_and_a_length():
    """Of TRL; those that only sample to show it in evaluation have no temperature."""
    folder = Path(importlib.util.find_spec("trl").origin).parent  # type: ignore[union-attr, arg-type]
    shown = {"orpo", "cpo"}
    for trainer in folder.rglob("*_trainer.py"):
        source, name = trainer.read_text(), trainer.stem.removesuffix("_trainer")
        config = trainer.with_name(f"{name}_config.py")
        samples = "unwrap_model_for_generation(" in source or "VLLMGeneration(" in source
        if config.exists() and name not in shown and (samples or name in ("sft", "dpo")):
            fields = set(re.findall(r"^    (\w+): ", config.read_text(), re.MULTILINE))
            has_length = bool(fields & {"max_completion_length", "max_new_tokens"})
            assert (has_length and "temperature" in fields) == samples, name
