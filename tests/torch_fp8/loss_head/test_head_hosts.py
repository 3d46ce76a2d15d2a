"""Loss heads by the flag alone: Accelerate, transformers' Trainer, Lightning and Fabric."""

import copy

import lightning.fabric
import lightning.pytorch
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from accelerate_fp8 import FP8Kwargs
from lightning_fp8 import FP8Precision
from tests.internals import HeadCall, OutputLayer
from tests.torch_fp8.loss_head.logits_cases import (
    LanguageModel,
    Largest,
    V,
    batch,
    is_fused,
    small_chunks,
)
from torch_fp8 import FP8Config

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": V,
}


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    small_chunks(monkeypatch)


@pytest.fixture(autouse=True)
def _reset():
    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()

    reset()
    yield
    reset()


def _llama():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY)).train()


def _own(model, tokens, labels):
    return F.cross_entropy(model(tokens).transpose(1, 2), labels)


def _shifted(model, tokens, labels):
    logits = model(tokens)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels[..., 1:].reshape(-1))


def _models_loss(model, tokens, labels):
    return model(tokens, labels=labels).loss


CASES = {
    "own loss": (LanguageModel, _own),
    "own shifted loss": (LanguageModel, _shifted),
    "the model's loss": (_llama, _models_loss),
}


def _alike(run, model):
    """Run with and without loss heads, compare the losses, and return the largest tensor."""
    results = []
    for loss_head in ("off", "bf16"):
        with Largest() as largest:
            losses = run(copy.deepcopy(model), FP8Config("tensorwise", loss_head=loss_head))
        results.append(torch.stack([loss.detach().float() for loss in losses]))
    # A step of Adam divides small differences of gradients by their size.
    torch.testing.assert_close(results[1], results[0], rtol=2e-4, atol=0)
    return largest.numel


@pytest.mark.parametrize("name", CASES)
def test_accelerate(name):
    make, loss_of = CASES[name]
    clip = loss_of is _own
    torch.manual_seed(0)

    def run(model, config):
        AcceleratorState._reset_state(reset_partial_state=True)
        options = {"gradient_accumulation_steps": 2, "kwargs_handlers": [FP8Kwargs(config)]}
        accelerator = Accelerator(mixed_precision="fp8", cpu=True, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for seed in range(4):
            with accelerator.accumulate(model):
                loss = loss_of(model, *batch(seed))
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
        return losses

    assert is_fused(_alike(run, make()))


@pytest.mark.parametrize("evaluates", [False, True], ids=["train", "with evaluation"])
def test_the_trainer(evaluates, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    copies = []
    own_weight = HeadCall.own_parameter
    monkeypatch.setattr(HeadCall, "own_parameter", lambda c, _: (copies.append(c), own_weight(c)))
    rows = [
        {"input_ids": t, "labels": y}
        for seed in range(4)
        for t, y in zip(*batch(seed, (2, 24)), strict=True)
    ]
    fused = []

    def run(model, config):
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setenv("TORCH_FP8_CONFIG", config.to_json())
        arguments = TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            report_to="none",
            per_device_train_batch_size=4,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            eval_strategy="epoch" if evaluates else "no",
            gradient_accumulation_steps=1,
        )

        def scores(p):
            return {"exact": float((p.predictions.argmax(-1) == p.label_ids).mean())}

        trainer = Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows[:2], compute_metrics=scores
        )
        trainer.train()
        head = model.get_output_embeddings()
        if isinstance(head, OutputLayer):
            fused.append((head.loss_head.fused, head.loss_head.reads))
        logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [torch.tensor(loss, dtype=torch.float32) for loss in logs]

    numel = _alike(run, _llama())
    assert fused == [(2, 0)]
    assert not copies  # the Trainer holds no logits in its optimizer's step
    assert evaluates or is_fused(numel)


class _Module(lightning.pytorch.LightningModule):
    def __init__(self, model, loss_of):
        super().__init__()
        self.model, self.loss_of, self.losses = model, loss_of, []

    def training_step(self, rows, _):
        loss = self.loss_of(self.model, *rows)
        self.log("loss", loss)
        self.losses.append(loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


@pytest.mark.parametrize("name", ["own shifted loss", "the model's loss"])
def test_lightnings_trainer(name):
    make, loss_of = CASES[name]
    torch.manual_seed(0)

    def run(model, config):
        module = _Module(model, loss_of)
        trainer = lightning.pytorch.Trainer(
            accelerator="cpu",
            devices=1,
            plugins=[FP8Precision(config)],
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, DataLoader([batch(seed) for seed in range(3)], batch_size=None))
        return module.losses

    assert is_fused(_alike(run, make()))


@pytest.mark.parametrize("name", ["own loss", "the model's loss"])
def test_fabric(name):
    make, loss_of = CASES[name]
    torch.manual_seed(0)

    def run(model, config):
        fabric = lightning.fabric.Fabric(
            accelerator="cpu", devices=1, plugins=[FP8Precision(config)]
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = fabric.setup(model, optimizer)
        losses = []
        for seed in range(3):
            losses.append(loss_of(model, *batch(seed)))
            fabric.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
        return losses

    assert is_fused(_alike(run, make()))
