"""transformers' arguments and Trainer under the launcher's flag."""

import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from torch_fp8.optimizer import Float8Optimizer


@pytest.fixture
def launched(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    return monkeypatch


def _precision(tmp_path: Path, **options: Any) -> str:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)
    return arguments.mixed_precision


@pytest.mark.parametrize(("rank", "messages"), [("0", 1), ("1", 0)])
def test_flag_wins_over_bf16_and_says_so_once(
    launched: pytest.MonkeyPatch,
    tmp_path: Path,
    rank: str,
    messages: int,
) -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.warning_once.cache_clear()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)  # caplog would see a propagated record twice
    logging.getLogger("transformers").addHandler(handler)
    launched.setenv("RANK", rank)
    try:
        assert _precision(tmp_path, bf16=True) == "fp8"
        assert _precision(tmp_path, bf16=True) == "fp8"
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert stream.getvalue().count("is overridden by --mixed_precision fp8") == messages


def test_bf16_without_the_flag_stays(accelerate: Any, tmp_path: Path) -> None:
    assert _precision(tmp_path, bf16=True) == "bf16"
    assert _precision(tmp_path) == "no"


@pytest.mark.usefixtures("launched")
def test_fp16_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _precision(tmp_path, fp16=True) == "fp16"


def test_bf16_stays_where_another_backend_was_chosen(
    launched: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched.setenv("ACCELERATE_FP8_BACKEND", "ao")
    assert _precision(tmp_path, bf16=True) == "bf16"


@pytest.mark.usefixtures("launched")
def test_data_parallel_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}]
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(tiny_model), arguments, train_dataset=rows
    )
    arguments._n_gpu = 2
    with pytest.raises(ValueError, match=r"DataParallel.*2 GPUs.*--multi_gpu"):
        trainer.train()


@pytest.mark.usefixtures("launched")
def test_trainer_with_accumulation_and_clipping_ends_with_the_best_weights(
    tmp_path: Path, tiny_model: Path
) -> None:
    tokens = torch.randint(4, 32, (16, 12), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=8,
        learning_rate=0.3,  # the loss grows: an early checkpoint is the best
        warmup_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    weight = model.model.layers[0].mlp.up_proj.weight
    assert isinstance(optimizer, Float8Optimizer)
    assert weight.dtype == torch.bfloat16
    assert optimizer.state[weight]["step"] == 6
    best = trainer.state.best_model_checkpoint
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    assert best.endswith(f"checkpoint-{min(losses, key=losses.__getitem__)}")
    assert min(losses, key=losses.__getitem__) != 6
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses.values()), rel=1e-6)

    trainer.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert saved["model.norm.weight"].dtype == torch.float32
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, parameter in opened.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).float()), name


@pytest.mark.usefixtures("launched")
def test_model_in_training_generates(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    unwrapped = trainer.accelerator.unwrap_model(trainer.model_wrapped).eval()
    prompt = torch.arange(4, 8)[None]
    generated = unwrapped.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert generated.shape == (1, 8)
