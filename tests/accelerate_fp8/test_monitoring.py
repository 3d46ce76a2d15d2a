import json

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from tests.accelerate_fp8.trainers import rows_of, trainer_of
from tests.internals import Float8Layer, is_paused, read_run

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def launched(accelerate, monkeypatch):
    def configure(**options):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        monkeypatch.setenv("TORCH_FP8_CONFIG", json.dumps({"recipe": "tensorwise", **options}))

    return configure


def _trainer(folder, model, steps, **options):
    options = {"logging_steps": 2, "per_device_train_batch_size": 2, **options}
    return trainer_of(folder, model, rows_of(32), max_steps=steps, **options)


def _outlier(trainer, steps):
    """Make the input of the down projection a thousand times larger in one channel."""
    layer = trainer.model.get_submodule(DOWN)

    def before(module, args):
        (x,) = args
        if trainer.state.global_step + 1 not in steps or not module.training:
            return (x,)
        factors = torch.ones(x.shape[-1])
        factors[3] = 1e4
        return (x * factors,)

    layer.register_forward_pre_hook(before)


def test_an_unmodified_trainer_logs_the_series_and_writes_them(
    launched, tmp_path, tiny_model, capsys, caplog
):
    launched(monitor=2)
    accumulation = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = _trainer(tmp_path, tiny_model, 7, save_strategy="no", **accumulation)
    trainer.train()
    history = trainer.state.log_history
    measured = [entry for entry in history if "fp8/alarm" in entry]
    assert [entry["step"] for entry in measured] == [2, 4, 6]
    assert [entry["step"] for entry in history if "loss" in entry] == [2, 4, 6]
    assert "monitor   every 2 steps; on an alarm: warn" in caplog.text
    assert "FP8 monitor: 7 steps, no event" in caplog.text
    assert measured[0][f"fp8/{DOWN}/input/sqnr"] > 25
    assert measured[1][f"fp8/{DOWN}/update/rms"] > 0
    assert "fp8/model" not in capsys.readouterr().out
    record = read_run(tmp_path)
    assert record.steps == [2, 4, 6]
    assert sorted(record.losses) == [1, 2, 3, 4, 5, 6, 7]
    losses = [sum(record.losses[s] for s in (n - 1, n)) / 2 for n in (2, 4, 6)]
    assert losses == pytest.approx([e["loss"] for e in history if "loss" in e], rel=1e-3)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:FP8 monitor, step")
def test_a_fall_back_outlives_a_checkpoint_of_the_trainer(launched, tmp_path, tiny_model):
    launched(monitor=2, on_alarm="bf16", fallback_steps=6)
    trainer = _trainer(tmp_path, tiny_model, 4, save_steps=4)
    _outlier(trainer, range(2, 3))
    trainer.train()
    assert is_paused(trainer.model.get_submodule(DOWN))
    resumed = _trainer(tmp_path, tiny_model, 10, save_steps=100)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    events = read_run(tmp_path).events
    kinds = [(e["step"], e["event"], e["layer"]) for e in events if e["layer"] == DOWN]
    assert kinds == [(2, "fallback", DOWN), (8, "return", DOWN)]
    layer = resumed.model.get_submodule(DOWN)
    assert isinstance(layer, Float8Layer)
    assert not is_paused(layer)


def test_a_monitor_of_a_resumed_run_counts_as_the_trainer_does(launched, tmp_path, tiny_model):
    launched()
    _trainer(tmp_path, tiny_model, 3, save_steps=3).train()
    launched(monitor=2)
    resumed = _trainer(tmp_path, tiny_model, 6, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    record = read_run(tmp_path)
    assert (record.steps, sorted(record.losses)) == ([4, 6], [4, 5, 6])
    measured = [entry["step"] for entry in resumed.state.log_history if "fp8/alarm" in entry]
    assert measured == [4, 6]


class _Tracker(GeneralTracker):
    name, requires_logging_directory = "list", False

    def __init__(self):
        super().__init__()
        self.logged: dict[int, dict[str, float]] = {}

    @property
    def tracker(self):
        return self.logged

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.logged.setdefault(step or 0, {}).update(values)


def test_a_loop_with_accelerate_logs_to_its_trackers_and_tells_of_a_spike(launched, tmp_path):
    launched(monitor=5)
    tracker = _Tracker()
    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=str(tmp_path))
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.randn(32, 64)
    for step in range(1, 26):
        loss = (model(x) - x).float().pow(2).mean() * (30 if step == 23 else 1)
        accelerator.backward(loss)
        if step == 25:
            with pytest.warns(RuntimeWarning, match="the loss of step 23 is .* far above"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(tmp_path / "state"))
    assert sorted(tracker.logged) == [5, 10, 15, 20, 25]
    assert "fp8/0/input/sqnr" in tracker.logged[5]
    record = read_run(tmp_path)
    assert [e["event"] for e in record.events] == ["loss_spike"]
    assert record.losses[23] > 10 * record.losses[22]


def _two_trained(folder):
    """Policy and value model of PPO with their optimizers, and a reference that nobody trains."""
    tracker = _Tracker()
    accelerator = Accelerator(
        cpu=True, log_with=tracker, project_dir=str(folder), gradient_accumulation_steps=2
    )
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    models = [torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in "ab")) for _ in range(3)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models[:2]]
    prepared = list(accelerator.prepare(*models[:2], *optimizers))
    return accelerator, tracker, [*prepared, accelerator.prepare_model(models[2], None, True)]


@pytest.mark.filterwarnings("ignore:FP8 monitor")
def test_each_of_several_models_has_losses_names_a_file_and_a_state_of_its_own(launched, tmp_path):
    launched(monitor=1, on_alarm="bf16")
    accelerator, tracker, (policy, value, *optimizers, reference) = _two_trained(tmp_path)
    losses: list[list[float]] = [[], []]
    for batch in range(6):
        x = torch.randn(16, 64)
        with accelerator.accumulate(policy, value):
            with torch.no_grad():
                reference(x)
            for i, model in enumerate((policy, value)):
                outlier = torch.where(torch.arange(64) == 5, 1e6 if i == batch / 2 else 1.0, 1.0)
                loss = (model(x * outlier) - x).float().pow(2).mean() / outlier.max() * (i + 1)
                accelerator.backward(loss)
                losses[i].append(loss.item())
                optimizers[i].step()
                optimizers[i].zero_grad()
    assert {"fp8/0/input/sqnr", "fp8/model2/0/input/sqnr"} <= set().union(*tracker.logged.values())
    for i, name in enumerate(("fp8_monitor.jsonl", "fp8_monitor_model2.jsonl")):
        record = read_run(tmp_path / name)
        means = [sum(losses[i][n : n + 2]) / 2 for n in (0, 2, 4)]
        assert [record.losses[s] for s in (1, 2, 3)] == pytest.approx(means, rel=1e-3)
        fallen = {e["step"] for e in record.events if e["event"] == "fallback"}
        assert fallen == {i + 1}
    assert read_run(tmp_path).notes == [
        "The run trained several models. This is the first one; the files of the others are "
        "fp8_monitor_model2.jsonl."
    ]
    assert is_paused(policy[0])
    assert is_paused(value[0])
    accelerator.save_state(str(tmp_path / "state"))
    again, _, (policy, value, *_) = _two_trained(tmp_path / "again")
    again.load_state(str(tmp_path / "state"))
    assert is_paused(policy[0])
    assert is_paused(value[0])
    first, second = again._fp8_preparation.monitoring._monitors.values()
    assert (first.step, second.step) == (3, 3)
    assert first.fallback.fallen["0"]["since"] == 1
    assert second.fallback.fallen["0"]["since"] == 2
