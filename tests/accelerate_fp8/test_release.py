import pytest
import torch
from torch import nn

from accelerate_fp8 import FP8Config
from tests.accelerate_fp8.trainers import trainer_of
from tests.internals import Float8Optimizer

RELEASE = FP8Config(gradient_release=True)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))


def _step(accelerator):
    model = _model()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    accelerator.backward(model(x).square().mean())
    return model, x


def test_clipping_is_refused_and_measuring_is_not(accelerator_with):
    accelerator = accelerator_with(RELEASE)
    parameters = list(_step(accelerator)[0].parameters())
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_ \(max_grad_norm=0 .*_release=Fa"):
        accelerator.clip_grad_norm_(parameters, 1.0)
    with pytest.raises(RuntimeError, match=r"clip_grad_value_.*need gradient_release=False"):
        accelerator.clip_grad_value_(parameters, clip_value=1.0)
    assert accelerator.clip_grad_norm_(parameters, float("inf")) == 0


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({}, r"clip_grad_norm_ \(max_grad_norm=0"),
        ({"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}, "gradient accumulation over"),
        ({"max_grad_norm": 0.0}, None),
    ],
    ids=["clipping", "accumulation", "runs"],
)
def test_trainer(accelerate, tiny_model, tmp_path, monkeypatch, options, refusal):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("TORCH_FP8_CONFIG", RELEASE.to_json())
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 32
    trainer = trainer_of(tmp_path, tiny_model, rows, max_steps=2, **options)
    if refusal is None:
        trainer.train()
        assert isinstance(trainer.optimizer.optimizer, Float8Optimizer)
        return
    with pytest.raises(RuntimeError, match=refusal):
        trainer.train()
