from dataclasses import replace

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Config, FP8FSDPStrategy, FP8Precision
from tests.internals import TransformerEngineLinear


class Regression(lightning.pytorch.LightningModule):
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


def fit(config, folder, ckpt_path=None, **kwargs):
    model = Regression()
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        plugins=[FP8Precision(config)] if config else None,
        logger=False,
        default_root_dir=folder,
        **{"max_epochs": 1, **kwargs},
    )
    trainer.fit(model, data(), data(), ckpt_path=ckpt_path)
    return model, trainer


@pytest.mark.parametrize(("level", "recipe"), [("O1", "auto"), ("O3", "auto"), ("O3", "delayed")])
def test_trains_as_with_our_own_layers_and_opens_in_a_stock_trainer(te, tmp_path, level, recipe):
    config = FP8Config(backend="transformer-engine", opt_level=level, recipe=recipe)
    model, trainer = fit(config, tmp_path)
    own = replace(config, backend="torch")
    assert set(model.classes) == {TransformerEngineLinear}
    assert model.losses == pytest.approx(fit(own, tmp_path)[0].losses, rel=0.05)
    assert [type(layer) for layer in model.net] == [nn.Linear, nn.ReLU, nn.Linear]
    path = trainer.checkpoint_callback.best_model_path
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved.keys() == model.state_dict().keys()
    assert {value.dtype for value in saved.values()} == {torch.float32}
    for again in (config, own, None)[recipe == "delayed" :]:  # the stub keeps no history
        resumed, _ = fit(again, tmp_path, path, max_epochs=2)
        assert resumed.losses[0] < 0.9 * model.losses[0]


@pytest.mark.parametrize("strategy", [FP8FSDPStrategy, ModelParallelStrategy])
def test_sharding_is_refused_by_name(te, tmp_path, strategy):
    with pytest.raises(ValueError, match="one device and under DDP"):
        fit(FP8Config(backend="transformer-engine"), tmp_path, strategy=strategy())
