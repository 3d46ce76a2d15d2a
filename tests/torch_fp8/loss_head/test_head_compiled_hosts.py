"""Loss heads by the flag alone in graphs that Accelerate, a Trainer or Lightning compiles."""

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
from tests.internals import LazyLogits
from tests.torch_fp8.loss_head.compiled_graphs import Graphs
from tests.torch_fp8.loss_head.logits_cases import batch, is_fused, small_chunks
from tests.torch_fp8.loss_head.test_head_hosts import TINY
from torch_fp8 import FP8Config

pytestmark = pytest.mark.long
ANOTHER = pytest.mark.combination


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Return the graphs that hosts compile, if they do; they have Inductor's place."""
    small_chunks(monkeypatch)
    torch._dynamo.reset()
    graphs, compile_ = Graphs(), torch.compile
    graphs.on = True

    def compiled(model=None, **_):
        return compile_(model, backend=graphs.backend) if graphs.on else model

    monkeypatch.setattr(torch, "compile", compiled)
    for state in (AcceleratorState, PartialState):
        state._reset_state(*([True] if state is AcceleratorState else []))
    GradientState._reset_state()
    yield graphs
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)


def _llama(family="llama"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **TINY)
    return AutoModelForCausalLM.from_config(config).train()


def _accelerate(model, config, dynamo_backend="inductor"):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        mixed_precision="fp8",
        cpu=True,
        dynamo_backend=dynamo_backend,
        kwargs_handlers=[FP8Kwargs(config)],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, kinds = [], []
    for seed in range(3):
        tokens, labels = batch(seed)
        output = model(input_ids=tokens, labels=labels)
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.detach())
        kinds.append(type(output.logits))
        assert output.logits.argmax(-1).shape == tokens.shape
    return accelerator, model, torch.stack(losses), kinds


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=ANOTHER)])
def test_accelerate(graphs, family):
    model, graphs.on = _llama(family), family == "llama"
    *_, want, _ = _accelerate(copy.deepcopy(model), FP8Config("tensorwise", loss_head="off"))
    assert not (graphs.on and is_fused(graphs.numel))
    graphs.on, graphs.numel, count = True, 0, graphs.count
    accelerator, prepared, losses, kinds = _accelerate(model, FP8Config("tensorwise"))
    torch.testing.assert_close(losses, want, rtol=5e-4, atol=0)
    assert is_fused(graphs.numel)
    assert graphs.count == (2 * count or 1)
    assert kinds == [LazyLogits] * 3
    options = {"keep_fp32_wrapper": False, "keep_torch_compile": False}
    unwrapped = accelerator.unwrap_model(prepared, **options)
    output = unwrapped(input_ids=batch()[0], labels=batch()[1])
    torch.testing.assert_close(output.logits.logsumexp(-1).shape, batch()[0].shape)


@pytest.mark.parametrize("compiles", [True, pytest.param(False, marks=ANOTHER)])
def test_the_trainer(graphs, compiles, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    pairs = [zip(*batch(seed, (2, 24)), strict=True) for seed in range(4)]
    rows = [{"input_ids": t, "labels": y} for pair in pairs for t, y in pair]
    losses = []
    for loss_head in ("off", "bf16"):
        AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setenv(
            "TORCH_FP8_CONFIG", FP8Config("tensorwise", loss_head=loss_head).to_json()
        )
        graphs.on = loss_head == "bf16"
        arguments = TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            report_to="none",
            per_device_train_batch_size=4,
            max_steps=2,
            torch_compile=compiles,
            logging_steps=1,
            save_strategy="no",
            eval_strategy="steps",
            eval_steps=1,
        )
        trainer = Trainer(_llama(), arguments, train_dataset=rows, eval_dataset=rows[:4])
        trainer.train()
        losses.append([r[k] for r in trainer.state.log_history for k in r if k.endswith("loss")])
    assert losses[1] == pytest.approx(losses[0], rel=5e-4)
    assert len(losses[0]) == 5
    assert is_fused(graphs.numel)
    assert bool(graphs.count) == compiles


class _Module(lightning.pytorch.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.losses = []

    def training_step(self, data):
        tokens, labels = data
        return self.model(input_ids=tokens, labels=labels).loss

    def on_train_batch_end(self, outputs, *_):
        self.losses.append(outputs["loss"].detach())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _fit(module, config, compiled):
    rows = [pair for seed in range(2) for pair in zip(*batch(seed), strict=True)]
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=FP8Precision(config),
    )
    loader = DataLoader(rows, batch_size=4)
    trainer.fit(torch.compile(module) if compiled == "whole" else module, loader)
    return torch.stack(module.losses)


@pytest.mark.parametrize("compiled", ["whole", pytest.param("model", marks=ANOTHER)])
def test_lightning(graphs, compiled):
    model = _llama()

    def run(loss_head):
        module = _Module(copy.deepcopy(model))
        if compiled == "model":
            module.model = torch.compile(module.model)
        return _fit(module, FP8Config("tensorwise", loss_head=loss_head), compiled)

    graphs.on = False
    want, graphs.on = run("off"), True
    torch.testing.assert_close(run("bf16"), want, rtol=5e-4, atol=0)
    assert is_fused(graphs.numel)
    assert graphs.count == 1


@pytest.mark.parametrize("early", [True, False], ids=["before setup", "after setup"])
def test_fabric(graphs, early, monkeypatch):
    # Fabric's own torch.compile remembers its arguments, which it repeats after setup.
    monkeypatch.setattr(
        "lightning.fabric.wrappers._to_compiled", lambda module, kwargs: torch.compile(module)
    )

    def run(loss_head):
        fabric = lightning.fabric.Fabric(
            accelerator="cpu",
            plugins=FP8Precision(FP8Config("tensorwise", loss_head=loss_head)),
        )
        model = _llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model = torch.compile(model) if early else model
        model, optimizer = fabric.setup(model, optimizer)
        model = model if early else torch.compile(model)
        losses = []
        graphs.numel = 0
        for seed in range(2):
            tokens, labels = batch(seed)
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)

    graphs.on = False
    want, graphs.on = run("off"), True
    torch.testing.assert_close(run("bf16"), want, rtol=5e-4, atol=0)
    assert is_fused(graphs.numel) == early  # else the graph is that of Fabric's own module
    assert graphs.count
