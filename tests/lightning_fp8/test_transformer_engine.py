"""``FP8Config(backend="transformer-engine")`` in the Trainer and in Fabric, on the stub."""

from dataclasses import replace

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Config, FP8FSDPStrategy, FP8Precision
from torch_fp8.nn.transformer_engine import TransformerEngineLinear

OPTIONS = [
    {"opt_level": "O1"},
    {"opt_level": "O2"},
    {"opt_level": "O3"},
    {"opt_level": "O2", "recipe": "delayed", "amax_history_len": 8},
]


class Regression(lightning.pytorch.LightningModule):
    """Calls a part of itself: its own forward does not run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        self.losses, self.classes = [], []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch).float().pow(2).mean()
        self.losses.append(loss.item())
        self.classes.append(type(self.net[0]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("loss", (self.net(batch) - batch).float().pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data():
    torch.manual_seed(1)
    return DataLoader(torch.randn(60, 64), batch_size=7)  # the last batch has 4


def fit(config, folder=None, ckpt_path=None, **kwargs):
    """A fit in FP8, or a stock one without `config`."""
    model = Regression()
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[] if config is None else [FP8Precision(config)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=folder is not None,
        default_root_dir=folder,
        **{"max_epochs": 1, **kwargs},
    )
    trainer.fit(model, data(), data(), ckpt_path=ckpt_path)
    return model, trainer


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_trains_as_with_our_own_layers(te, options):
    model, trainer = fit(FP8Config(backend="transformer-engine", **options))
    ours, _ = fit(FP8Config(**options))
    assert set(model.classes) == {TransformerEngineLinear}
    assert model.losses == pytest.approx(ours.losses, rel=0.05)
    assert [type(layer) for layer in model.net] == [nn.Linear, nn.ReLU, nn.Linear]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert list(model.state_dict()) == list(Regression().state_dict())
    assert len(trainer.optimizers[0].state) == 4


def test_a_checkpoint_opens_in_a_stock_trainer_and_with_the_other_backend(te, tmp_path):
    config = FP8Config(backend="transformer-engine", opt_level="O1", recipe="tensorwise")
    model, trainer = fit(config, tmp_path)
    path = trainer.checkpoint_callback.best_model_path
    saved = torch.load(path, weights_only=True)
    assert list(saved["state_dict"]) == list(model.state_dict())
    fit(None, tmp_path / "stock", path, max_epochs=2)
    for backend in ("transformer-engine", "torch"):
        config = replace(config, backend=backend)
        again, _ = fit(config, tmp_path / backend, path, max_epochs=2)
        assert again.losses[0] < 0.9 * model.losses[0]


@pytest.mark.parametrize("strategy", [FP8FSDPStrategy, ModelParallelStrategy])
def test_sharding_is_refused_by_name(te, strategy):
    with pytest.raises(ValueError, match="one device and under DDP"):
        fit(FP8Config(backend="transformer-engine"), strategy=strategy())
