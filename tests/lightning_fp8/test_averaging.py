import importlib

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader

import torch_fp8
from lightning_fp8 import FP8Config, FP8Precision
from tests.lightning_fp8.hosts import make_net, one_trainer

LR = 1e-6
EPOCHS = 4

CALLBACKS = {
    "EMA": lambda callbacks: callbacks.EMAWeightAveraging(decay=0.9),
    "mean": lambda callbacks: callbacks.WeightAveraging(),
    "SWA": lambda callbacks: callbacks.StochasticWeightAveraging(LR, swa_epoch_start=1),
}
each_callback = pytest.mark.parametrize("kind", CALLBACKS)
LEVELS, OTHERS = ("O2", "O3", "O2"), ("O3", "O2", "O3")
"""Of each callback in one host and in the other."""


def make_model(host):
    class Regression(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()
            self.trained = []

        def training_step(self, batch, batch_idx):
            return (self.net(batch) - batch).float().pow(2).mean()

        def validation_step(self, batch, batch_idx):
            pass

        def on_train_batch_end(self, *args):
            merged = torch_fp8.merged_state_dict(self.net, self.trainer.optimizers)
            self.trained.append(merged["0.weight"])

        def configure_optimizers(self):
            return AdamW(self.parameters(), lr=LR, weight_decay=0.0)

    return Regression()


def fit(host, level, callbacks=(), ckpt_path=None, **kwargs):
    trainer = host.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[FP8Precision(FP8Config(opt_level=level))],
        max_epochs=EPOCHS,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **kwargs},
    )
    model = make_model(host)
    torch.manual_seed(1)
    x = torch.randn(64, 64)
    loaders = DataLoader(x, batch_size=8), DataLoader(x, batch_size=64)
    trainer.fit(model, *loaders, ckpt_path=ckpt_path)
    return model


def make_callback(host, kind):
    return CALLBACKS[kind](importlib.import_module(f"{host.__name__}.callbacks"))


@pytest.mark.parametrize(
    ("host", "level", "kind"),
    [
        *((lightning.pytorch, level, kind) for level, kind in zip(LEVELS, CALLBACKS, strict=True)),
        *((pytorch_lightning, level, kind) for level, kind in zip(OTHERS, CALLBACKS, strict=True)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_average_follows_that_of_float32_weights(host, level, kind):
    """Over steps far below a BF16 ulp: 32 of 1e-6, where an ulp is 5e-4.

    Measured cosine 0.945 and more, norms within 6 %, which is what 8-bit states do to 32 steps;
    0.14 and four times the norm where the callbacks see BF16 weights alone.
    """
    start = make_net()[0].weight
    ours, theirs = (
        fit(host, chosen, [make_callback(host, kind)]).net[0].weight - start
        for chosen in (level, "O1")
    )
    assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.92
    torch.testing.assert_close(ours.norm(), theirs.norm(), rtol=0.1, atol=0)


@one_trainer
@each_callback
def test_training_goes_on_as_without_the_callback(host, kind):
    callback = make_callback(host, kind)
    averaged, plain = fit(host, "O3", [callback]), fit(host, "O3")
    assert all(torch.equal(a, b) for a, b in zip(averaged.trained, plain.trained, strict=True))
    assert len(averaged.trained) == EPOCHS * 8
    assert not torch.equal(averaged.net[0].weight, plain.net[0].weight)
    ours = {"_swap_models", "_copy_average_to_current", "update_parameters", "transfer_weights"}
    assert not ours & vars(callback).keys()
    assert {p.dtype for p in averaged.parameters()} == {torch.float32}


@pytest.mark.long
@one_trainer
def test_average_resumes_exactly(host, tmp_path):
    callbacks = importlib.import_module(f"{host.__name__}.callbacks")

    def checkpoint():
        return callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)

    whole = fit(host, "O2", [make_callback(host, "EMA"), checkpoint()], enable_checkpointing=True)
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)
    assert saved["state_dict"]["net.0.weight"].dtype == torch.float32
    assert saved["current_model_state"]["net.0.weight"].dtype == torch.float32

    again = fit(host, "O2", [make_callback(host, "EMA")], ckpt_path=tmp_path / "epoch=1.ckpt")
    assert torch.equal(again.net[0].weight, whole.net[0].weight)


def test_what_a_user_wrote_is_left_to_the_user():
    host = lightning.pytorch
    calls = []

    class Mine(lightning.pytorch.callbacks.WeightAveraging):
        def _copy_average_to_current(self, pl_module):
            calls.append(pl_module.net[0].weight.dtype)

    fit(host, "O2", [Mine()])
    assert calls == [torch.float32]
