"""`save_attention` through Accelerate, which Trainer and TRL prepare their models by."""

import accelerate
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from accelerate_fp8 import FP8Kwargs
from torch_fp8 import FP8Config, revert
from torch_fp8.conversion.attention_layers import is_marked

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def _model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.fixture(autouse=True)
def _clean():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_takes_the_option():
    handler = FP8Kwargs(FP8Config(save_attention="qkv"))
    host = accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=[handler], cpu=True)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = host.prepare(model, optimizer)
    assert sum(map(is_marked, model.modules())) == 2
    revert(model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_takes_it_from_the_environment(tmp_path, monkeypatch, checkpointing):
    """Losses are nearly those of a run that rounds nothing."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    texts = [torch.arange(i, i + 16) for i in range(8)]
    rows = [{"input_ids": text, "labels": text} for text in texts]
    losses = {}
    for save in ("qkv", "bf16"):
        monkeypatch.setenv("TORCH_FP8_CONFIG", f'{{"save_attention": "{save}"}}')
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, use_cpu=True, report_to=[], logging_steps=1, bf16=False,
            gradient_checkpointing=checkpointing, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(_model(), arguments, train_dataset=rows)
        trainer.train()
        losses[save] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert sum(map(is_marked, trainer.model.modules())) == (2 if save == "qkv" else 0)
        revert(trainer.model)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert losses["qkv"] == pytest.approx(losses["bf16"], rel=5e-3)
    assert losses["qkv"] != losses["bf16"]
