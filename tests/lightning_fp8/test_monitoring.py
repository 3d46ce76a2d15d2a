import lightning.fabric
import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_fp8
from lightning_fp8 import FP8Config, FP8Precision
from tests.internals import is_paused, read_run


def _model(host):
    class Regression(host.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
            self.kept, self.losses = {}, []

        def training_step(self, batch, batch_idx):
            step = self.trainer.global_step + 1
            self.kept[step] = self.net[0].weight.detach().clone()
            self.paused = is_paused(self.net[2])
            loss = (self.net(batch) - batch).float().pow(2).mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Regression()


def _data(outlier=()):
    rows = torch.randn(32, 8, 64, generator=torch.Generator().manual_seed(1))
    for step in outlier:
        rows[step - 1, :, 3] *= 1e5
    return DataLoader(rows, batch_size=None, shuffle=False)


def _trainer(host, folder, steps, config, callbacks=(), **options):
    options = {"enable_checkpointing": False, **options}
    return host.Trainer(
        max_steps=steps,
        accelerator="cpu",
        plugins=[FP8Precision(config)],
        logger=getattr(host.loggers, "CSVLogger")(folder, name="", version=""),  # noqa: B009
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )


@pytest.mark.parametrize("host", [lightning.pytorch, pytorch_lightning], ids=lambda h: h.__name__)
def test_series_stand_in_the_loggers_and_the_file_in_log_dir(host, tmp_path):
    config, model = FP8Config(recipe="delayed", monitor=3), _model(host)
    trainer = _trainer(host, tmp_path, 7, config, accumulate_grad_batches=2)
    trainer.fit(model, _data())
    metrics = (tmp_path / "metrics.csv").read_text().splitlines()
    assert "fp8/net.0/input/sqnr" in metrics[0]
    assert trainer.callback_metrics["fp8/alarm"] == 0
    record = read_run(tmp_path)
    assert record.steps == [3, 6]
    assert sorted(record.losses) == [1, 2, 3, 4, 5, 6, 7]
    means = [sum(model.losses[i : i + 2]) / 2 for i in range(0, 14, 2)]
    assert list(record.losses.values()) == pytest.approx(means, rel=1e-3)


def test_the_removed_callback_is_refused():
    with pytest.raises(ImportError, match=r"FP8Monitor was removed: use plugins=\[FP8Prec"):
        lightning_fp8.FP8Monitor  # noqa: B018


@pytest.mark.filterwarnings("ignore:FP8 monitor, step")
def test_a_fall_back_outlives_a_checkpoint(tmp_path):
    host = lightning.pytorch
    config = FP8Config(recipe="tensorwise", monitor=2, on_alarm="bf16", fallback_steps=100)
    every = host.callbacks.ModelCheckpoint(
        tmp_path, every_n_train_steps=9, save_top_k=-1, filename="{step}"
    )
    trainer = _trainer(host, tmp_path, 22, config, [every], enable_checkpointing=True)
    model = _model(host)
    trainer.fit(model, _data(outlier=[2]))
    events = [(e["step"], e["event"]) for e in read_run(tmp_path).events if e["event"] != "alarm"]
    assert (2, "fallback") in events
    resumed = _trainer(host, tmp_path / "again", 20, config)
    model = _model(host)
    resumed.fit(model, _data(), ckpt_path=str(tmp_path / "step=18.ckpt"))
    assert model.kept.keys() == {19, 20}
    layer = next(e["layer"] for e in read_run(tmp_path).events if e["event"] == "fallback")
    assert layer == "net.0"


def test_a_monitor_of_a_resumed_run_counts_as_the_trainer_does(tmp_path):
    host, config = lightning.pytorch, FP8Config(recipe="tensorwise")
    trainer = _trainer(host, tmp_path, 5, config)
    trainer.fit(_model(host), _data())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    config = FP8Config(recipe="tensorwise", monitor=2)
    resumed = _trainer(host, tmp_path / "again", 9, config)
    resumed.fit(_model(host), _data(), ckpt_path=str(tmp_path / "last.ckpt"))
    record = read_run(tmp_path / "again")
    assert (record.steps, sorted(record.losses)) == ([6, 8], [6, 7, 8, 9])


@pytest.mark.filterwarnings("ignore:FP8 monitor, step")
def test_fabric_measures_and_falls_back_and_says_that_it_knows_no_logger():
    config = FP8Config(recipe="tensorwise", monitor=2, on_alarm="bf16")
    fabric = lightning.fabric.Fabric(accelerator="cpu", plugins=[FP8Precision(config)])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    for batch in list(_data(outlier=[2]))[:4]:
        loss = (model(batch) - batch).float().pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    (monitor,) = fabric._precision._monitors.values()
    assert is_paused(net[0])
    assert [e["event"] for e in monitor.events][:2] == ["alarm", "fallback"]
    assert monitor.step == 4


@pytest.mark.filterwarnings("ignore:FP8 monitor, step")
def test_the_state_of_the_plugin_has_the_monitor_of_each_model():
    def set_up():
        plugin = FP8Precision(FP8Config(recipe="tensorwise", monitor=100))
        fabric = lightning.fabric.Fabric(accelerator="cpu", plugins=[plugin])
        nets = [torch.nn.Linear(64, 64) for _ in range(2)]
        return fabric, [fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1)) for net in nets]

    fabric, parts = set_up()
    for model, optimizer in [parts[0], *parts]:
        fabric.backward(model(torch.randn(16, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = fabric.strategy.precision.state_dict()
    assert [monitor["step"] for monitor in state["monitor"]] == [2, 1]
    again, parts = set_up()
    again.strategy.precision.load_state_dict(state)
    for model, _ in parts:
        model(torch.randn(16, 64))
    assert again.strategy.precision.state_dict()["monitor"] == state["monitor"]
