"""What Lightning's documentation promises of callbacks and optimization, with FP8 as the precision.

Lightning's own tests do not ship in its wheel; these are not copies of them.
"""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.slow


class Classifier(pl.LightningModule):
    def __init__(self, lr=1e-2, batch_size=8):
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.lr, self.batch_size = lr, batch_size
        self.backbone = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
        self.head = nn.Linear(128, 64)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        loss = (self(batch) - batch).float().square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self(batch) - batch).float().square().mean())

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def train_dataloader(self):
        torch.manual_seed(1)
        return DataLoader(torch.randn(64, 64), batch_size=self.batch_size)

    def configure_optimizers(self):
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=self.lr)


def _trainer(folder, *used, **options):
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision=options.pop("precision", "fp8-mixed"),
        logger=options.pop("logger", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, callbacks.Checkpoint) for c in used),
        callbacks=list(used),
        default_root_dir=folder,
        **{"max_epochs": 2, **options},
    )


def test_the_learning_rate_finder_suggests_one_and_leaves_the_weights(tmp_path):
    model = Classifier()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    finder = Tuner(_trainer(tmp_path, max_epochs=1)).lr_find(model, num_training=8)
    assert len(finder.results["lr"]) == 8
    for name, tensor in model.state_dict().items():  # rounded once to BF16 and its residual
        torch.testing.assert_close(tensor, before[name], rtol=2**-16, atol=0)


def test_a_backbone_is_thawed_while_training(tmp_path):
    """The callback adds a parameter group to the converted optimizer."""

    class Thaw(callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.backbone)

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=1e-2)

    model, weights = Classifier(), []
    copies = callbacks.LambdaCallback(
        on_train_epoch_end=lambda trainer, module: weights.append(
            module.backbone[0].weight.detach().float().clone()
        )
    )
    trainer = _trainer(tmp_path, Thaw(), copies)
    start = model.backbone[0].weight.detach().clone()
    trainer.fit(model)
    assert torch.equal(weights[0], start)
    assert not torch.equal(weights[1], start)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_an_exception_leaves_a_checkpoint_to_go_on_from(tmp_path):
    class Fails(callbacks.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 5:
                raise RuntimeError("as it happens")

    saves = callbacks.OnExceptionCheckpoint(tmp_path)
    with pytest.raises(RuntimeError, match="as it happens"):
        _trainer(tmp_path, saves, Fails(), max_epochs=1).fit(Classifier())
    resumed = _trainer(tmp_path, max_epochs=1)
    resumed.fit(Classifier(), ckpt_path=tmp_path / "on_exception.ckpt")
    assert resumed.global_step == 8
