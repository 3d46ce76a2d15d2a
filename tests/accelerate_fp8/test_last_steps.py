"""`FP8Config(bf16_last=...)` in transformers' Trainer, and in a loop of one's own."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import torch_fp8
from tests.internals import Float8Layer


@pytest.fixture
def launched(accelerate, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"bf16_last": 0.3}')
    return accelerate


def _trainer(tmp_path, tiny_model, **options):
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{"max_steps": 6, "save_strategy": "no"} | options,
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:1])
    seen: list[bool] = []

    def note(*_):
        layer = next(m for m in model.modules() if isinstance(m, Float8Layer))
        seen.append(layer.fp8.recipe.bf16_forward)

    model.register_forward_pre_hook(note)
    return trainer, seen


@pytest.mark.usefixtures("launched")
def test_the_last_steps_run_in_bf16(tmp_path, tiny_model, caplog):
    trainer, seen = _trainer(tmp_path, tiny_model, gradient_accumulation_steps=2)
    trainer.train()
    assert seen == [False] * 8 + [True] * 4
    trainer.evaluate()
    assert seen[-1]
    assert caplog.text.count("the forward runs in BF16 from step 5 of 6 on") == 1
    trainer.train()  # once more, from the first step
    assert seen[13:] == [False] * 8 + [True] * 4


@pytest.mark.usefixtures("launched")
def test_a_resumed_run_is_in_bf16_where_it_was(tmp_path, tiny_model):
    trainer, _ = _trainer(tmp_path, tiny_model, save_strategy="steps", save_steps=5)
    trainer.train()
    trainer, seen = _trainer(tmp_path, tiny_model)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert seen == [True]


def test_a_loop_of_ones_own_is_refused_with_the_way_out(launched, monkeypatch):
    def train(accelerator):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        torch_fp8.set_forward_precision(model, "bf16")
        accelerator.backward(model(torch.ones(16, 64)).sum())
        optimizer.step()

    accelerator = launched.Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"a loop of your own does not know.*set_forward_prec"):
        train(accelerator)
    monkeypatch.delenv("TORCH_FP8_CONFIG")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    train(launched.Accelerator(cpu=True))
