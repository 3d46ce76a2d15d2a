import io
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments

from tests.accelerate_fp8.trainers import rows_of, trainer_of
from tests.internals import Float8Optimizer, SplitWeight, post_init


@pytest.fixture
def launched(accelerate, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    return monkeypatch


def _precision(tmp_path, **options):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)
    # transformers 4 leaves it in the environment.
    left = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return getattr(arguments, "mixed_precision", left)


class _Arguments4:
    def __init__(self, bf16):
        self.bf16 = bf16

    def __post_init__(self):
        if self.bf16:
            os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize(("backend", "expected"), [("", "fp8"), ("te", "bf16"), ("ao", "bf16")])
def test_transformers_4_hands_the_precision_over_by_environment(launched, bf16, backend, expected):
    launched.setenv("ACCELERATE_FP8_BACKEND", backend)
    post_init(_Arguments4.__post_init__, _Arguments4(bf16))
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == (expected if bf16 else "fp8")


@pytest.mark.parametrize(("rank", "messages"), [("0", 1), ("1", 0)])
def test_flag_wins_over_bf16_and_says_so_once(launched, tmp_path, rank, messages):
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


@pytest.mark.parametrize(
    ("launcher", "options", "precision"),
    [
        ({}, {"bf16": True}, "bf16"),
        ({}, {}, "no"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {"fp16": True}, "fp16"),
        (
            {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "ao"},
            {"bf16": True},
            "bf16",
        ),
    ],
    ids=["bf16", "none", "fp16", "another backend"],
)
@pytest.mark.usefixtures("accelerate")
def test_another_precision_stays(tmp_path, monkeypatch, launcher, options, precision):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    assert _precision(tmp_path, **options) == precision


@pytest.mark.usefixtures("launched")
def test_data_parallel_is_refused(tmp_path, tiny_model):
    trainer = trainer_of(tmp_path, tiny_model, rows_of(), max_steps=1)
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match=r"DataParallel.*2 GPUs.*--multi_gpu"):
        trainer.train()


@pytest.mark.usefixtures("launched")
def test_trainer_with_accumulation_and_clipping_ends_with_the_best_weights(tmp_path, tiny_model):
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "warmup_steps": 4}
    options |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 8}
    options |= {"eval_strategy": "steps", "load_best_model_at_end": True}
    options |= dict.fromkeys(("eval_steps", "save_steps"), 2)
    options["learning_rate"] = 0.3  # the loss grows: an early checkpoint is the best
    trainer = trainer_of(tmp_path, tiny_model, rows_of(), rows_of()[:8], max_steps=6, **options)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    assert isinstance(optimizer, Float8Optimizer)
    assert isinstance(weight, SplitWeight)
    assert optimizer.state[weight]["step"] == 6
    best = trainer.state.best_model_checkpoint
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    assert best.endswith(f"checkpoint-{min(losses, key=losses.__getitem__)}")
    assert min(losses, key=losses.__getitem__) != 6
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses.values()), rel=1e-6)

    trainer.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    of_the_best = load_file(Path(best) / "model.safetensors")
    assert all(torch.equal(saved[name], of_the_best[name]) for name in of_the_best)
    weight = saved["model.layers.0.mlp.up_proj.weight"]
    assert (weight != weight.bfloat16().float()).any()  # it has its residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_saved_model_has_the_dtypes_that_bf16_training_saves(
    launched, tmp_path, tiny_model, level, dtype, caplog
):
    from accelerate.state import AcceleratorState

    launched.setenv("TORCH_FP8_CONFIG", f'{{"opt_level": "{level}"}}')
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    dtypes: dict[str, Any] = {}
    for precision in ("fp8", "bf16"):
        launched.setenv("ACCELERATE_MIXED_PRECISION", precision)
        AcceleratorState._reset_state(reset_partial_state=True)
        folder = tmp_path / precision
        options = {"max_steps": 2, "save_steps": 2, "learning_rate": 1e-3, "bf16": True}
        trainer = trainer_of(folder, tiny_model, rows, load={"dtype": dtype}, **options)
        trainer.train()
        trainer.save_model(str(folder / "final"))
        accelerator = trainer.accelerator
        accelerator.save_model(trainer.model_wrapped, folder / "by_accelerator")
        unwrapped = accelerator.unwrap_model(trainer.model_wrapped)
        state = accelerator.get_state_dict(trainer.model_wrapped)
        unwrapped.save_pretrained(folder / "by_hand", state_dict=state)
        unwrapped.save_pretrained(folder / "without_state_dict")
        for path in sorted(folder.glob("*/model.safetensors")):
            saved = load_file(path)
            config = path.with_name("config.json")
            named = json.loads(config.read_text())["dtype"] if config.exists() else None
            kept = {name: tensor.dtype for name, tensor in saved.items()}
            dtypes.setdefault(path.parent.name, []).append((named, kept))
    assert len(dtypes) == 5
    for name, (ours, stock) in dtypes.items():
        assert ours == stock, name
        assert set(ours[1].values()) == {dtype}
        assert ours[0] in (str(dtype).removeprefix("torch."), None)
    assert "saved whole" not in caplog.text  # which shards alone are not


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tokens_that_are_added_after_training_are_saved(tmp_path, tiny_model, tied):
    rows = [{"input_ids": torch.arange(4, 16), "labels": torch.arange(4, 16)}] * 4
    load = {"tie_word_embeddings": tied}
    options = {"max_steps": 1, "save_strategy": "no"}
    trainer = trainer_of(tmp_path, tiny_model, rows, load=load, **options)
    trainer.train()
    model = trainer.model
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, SplitWeight)
    trained = embedding.detach().clone()
    model.resize_token_embeddings(76)
    for save in (trainer.save_model, model.save_pretrained):
        save(tmp_path / save.__name__)
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / save.__name__)
        assert {p.dtype for p in opened.parameters()} == {torch.float32}
        saved = opened.get_input_embeddings().weight
        assert saved.shape == (76, 64)
        assert torch.equal(saved[:64], trained)
        assert (opened.get_output_embeddings().weight is saved) == tied
