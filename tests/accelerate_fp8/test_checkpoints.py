"""Checkpoints: plain tensors under their own names, residuals in the optimizer's, and delayed
scaling's history beside them."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate_fp8 import FP8Config, FP8Kwargs
from tests.accelerate_fp8.trainers import rows_of, trainer_of
from tests.internals import SplitWeight, load_history, save_history
from torch_fp8 import convert_to_float8, scaling_state_dict

DELAYED = FP8Config(recipe="delayed", amax_history_len=4)
DELAYED_O1 = FP8Config(recipe="delayed", amax_history_len=4, opt_level="O1")
HISTORY = "fp8_scaling_0.safetensors"


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Tanh(), nn.Linear(96, 64))


class Training:
    """Model and optimizer of an Accelerator, and steps on data that depend on their number only."""

    def __init__(self, accelerate, config, precision="fp8"):
        handlers = [FP8Kwargs(config)] if config else None
        self.accelerator = accelerate.Accelerator(
            mixed_precision=precision, kwargs_handlers=handlers, cpu=True
        )
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def steps(self, *numbers):
        losses = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(16, 64, generator=generator) * (1 + number % 3)
            loss = nn.functional.mse_loss(self.model(x), x)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def bits(self):
        parameters = list(self.model.parameters())
        states = [self.optimizer.state[p] for p in parameters]
        return [*parameters, *(state[key] for state in states for key in sorted(state))]


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
@pytest.mark.parametrize(
    "config", [DELAYED, DELAYED_O1, FP8Config(opt_level="O3")], ids=["O2", "O1", "O3"]
)
def test_training_resumes_bit_for_bit(accelerate, tmp_path, config, safe):
    run = Training(accelerate, config)
    run.steps(*range(6))
    run.accelerator.save_state(tmp_path, safe_serialization=safe)
    history = scaling_state_dict(run.model)
    expected = run.steps(6, 7, 8)
    large = run.model[0].weight
    assert isinstance(large, SplitWeight) == (config.opt_level != "O1")

    resumed = Training(accelerate, config)
    resumed.accelerator.load_state(tmp_path)
    restored = scaling_state_dict(resumed.model)
    assert bool(history) == (config.recipe == "delayed")
    assert all(torch.equal(history[key], restored[key]) for key in history)
    assert resumed.steps(6, 7, 8) == expected
    assert all(map(torch.equal, run.bits(), resumed.bits()))


def test_other_recipes_write_no_history(accelerate, tmp_path):
    (tmp_path / HISTORY).write_bytes(b"of an earlier run into this folder")
    Training(accelerate, FP8Config()).accelerator.save_state(tmp_path)
    assert not (tmp_path / HISTORY).exists()


def test_history_is_per_process_and_falls_back_to_the_first(tmp_path):
    models = []
    for rank in range(2):
        model = _model()
        convert_to_float8(model, DELAYED)
        model(torch.full((16, 64), 1.0 + rank))
        save_history([model], tmp_path, rank)
        models.append(model)
    for rank, source in ((0, 0), (1, 1), (2, 0)):
        model = _model()
        convert_to_float8(model, DELAYED)
        load_history([model], tmp_path, rank)
        expected, loaded = scaling_state_dict(models[source]), scaling_state_dict(model)
        assert all(torch.equal(expected[key], loaded[key]) for key in expected)


def test_each_of_several_models_gets_its_own_history(tmp_path):
    models = [_model() for _ in range(4)]
    for i, model in enumerate(models):
        convert_to_float8(model, DELAYED)
        if i < 2:
            model(torch.full((16, 64), 1.0 + i))
    save_history(models[:2], tmp_path, 0)
    load_history(models[2:], tmp_path, 0)
    states = [scaling_state_dict(model) for model in models]
    assert not all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    for saved, loaded in zip(states[:2], states[2:], strict=True):
        assert all(torch.equal(saved[key], loaded[key]) for key in saved)


def test_history_is_written_atomically(tmp_path, monkeypatch):
    model = _model()
    convert_to_float8(model, DELAYED)
    save_history([model], tmp_path, 0)
    before = (tmp_path / HISTORY).read_bytes()

    def interrupted(tensors, path):
        Path(path).write_bytes(b"half a fi")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_history([model], tmp_path, 0)
    assert (tmp_path / HISTORY).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [HISTORY]


@pytest.mark.parametrize(("saved", "loaded"), [("bf16", "fp8"), ("fp8", "bf16")])
@pytest.mark.parametrize("config", [DELAYED, DELAYED_O1], ids=["O2", "O1"])
def test_state_moves_between_stock_training_and_fp8(accelerate, tmp_path, saved, loaded, config):
    configs = {"fp8": config, "bf16": None}
    run = Training(accelerate, configs[saved], saved)
    run.steps(0, 1)
    run.accelerator.save_state(tmp_path)
    weights = [parameter.detach().clone() for parameter in run.model.parameters()]
    state = run.optimizer.state_dict()["state"]

    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    other = Training(accelerate, configs[loaded], loaded)
    other.accelerator.load_state(tmp_path)
    for weight, parameter in zip(weights, other.model.parameters(), strict=True):
        assert torch.equal(weight.to(parameter.dtype), parameter.to(parameter.dtype))
    for index, entry in other.optimizer.state_dict()["state"].items():
        assert entry["step"] == 2
        error = entry["exp_avg"] - state[index]["exp_avg"]
        assert error.norm() <= 0.06 * state[index]["exp_avg"].norm()
    assert all(loss < 10 for loss in other.steps(2, 3))


@pytest.mark.long
def test_trainer_resumes_delayed_scaling_exactly(accelerate, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("TORCH_FP8_CONFIG", DELAYED.to_json())

    def train(resume=None):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        options = {"save_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
        folder = tmp_path / "trainer"
        trainer = trainer_of(folder, tiny_model, rows_of(), max_steps=6, **options)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return trainer.model

    checkpoint = tmp_path / "checkpoint-3"
    through = train()
    shutil.copytree(tmp_path / "trainer" / "checkpoint-3", checkpoint)
    assert (checkpoint / HISTORY).is_file()
    resumed = train(checkpoint)
    expected, restored = scaling_state_dict(through), scaling_state_dict(resumed)
    assert all(torch.equal(expected[key], restored[key]) for key in expected)
    assert all(map(torch.equal, through.parameters(), resumed.parameters()))

    (checkpoint / HISTORY).unlink()  # the control: without it the run goes another way
    other = train(checkpoint)
    assert not all(map(torch.equal, through.parameters(), other.parameters()))
