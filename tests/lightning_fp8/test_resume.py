"""Checkpoints of split weights, written while a Trainer or Fabric trains, and who opens them."""

import functools
import importlib

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import torch_fp8
from lightning_fp8 import FP8Config, FP8Precision
from torch_fp8.optim.optimizer import Float8Optimizer

TRAINERS = [lightning.pytorch, pytorch_lightning]
FABRICS = [lightning.fabric, lightning_fabric]
each_trainer = pytest.mark.parametrize("host", TRAINERS, ids=lambda host: host.__name__)
each_fabric = pytest.mark.parametrize("host", FABRICS, ids=lambda host: host.__name__)
each_level = pytest.mark.parametrize("level", ["O2", "O3"])
HOST = lightning.pytorch
EPOCHS, STEPS = 3, 6


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 64))


def batches():
    torch.manual_seed(1)
    return torch.randn(8 * STEPS, 64)


def loss(net, batch):
    return (net(batch) - batch).float().pow(2).mean()


def make_model(host):
    class Regression(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch, batch_idx):
            return loss(self.net, batch)

        def configure_optimizers(self):
            optimizer = AdamW(self.parameters(), lr=1e-3)
            scheduler = {"scheduler": StepLR(optimizer, 4, gamma=0.7), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    return Regression()


def fit(host, folder, precision, max_epochs=EPOCHS, ckpt_path=None, callbacks=(), **kwargs):
    """A fit that saves after each epoch; `precision` is a level, or one of Lightning's strings."""
    if precision in ("O1", "O2", "O3"):
        chosen = {"plugins": [FP8Precision(FP8Config(opt_level=precision))]}
    else:
        chosen = {"precision": precision}
    checkpoint = importlib.import_module(f"{host.__name__}.callbacks").ModelCheckpoint(
        dirpath=folder, filename=f"{precision}-{{epoch}}", save_top_k=-1
    )
    trainer = host.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        callbacks=[checkpoint, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **chosen,
        **kwargs,
    )
    model = make_model(host)
    trainer.fit(model, DataLoader(batches(), batch_size=8), ckpt_path=ckpt_path)
    return model.net.state_dict(), trainer


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


def assert_close(a, b):
    """Two ways of a few steps of 1e-3 from the same weights, one of them in fewer bits."""
    start = make_net().state_dict()
    a, b = (torch.cat([(s[k] - start[k]).flatten() for k in start]) for s in (a, b))
    assert torch.cosine_similarity(a, b, dim=0) > 0.95


@each_trainer
@each_level
def test_run_resumed_from_a_checkpoint_within_it_equals_the_uninterrupted_one(
    host, tmp_path, level
):
    uninterrupted, _ = fit(host, tmp_path, level)
    path = tmp_path / f"{level}-epoch=0.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"]["net.0.weight"].dtype == torch.float32
    assert {type(tensor) for tensor in saved["state_dict"].values()} == {torch.Tensor}
    state = saved["optimizer_states"][0]["state"][0]
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        "step": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }
    resumed, trainer = fit(host, tmp_path / "resumed", level, ckpt_path=path)
    assert trainer.global_step == EPOCHS * STEPS
    assert same(resumed, uninterrupted)


def test_whole_weights_bring_the_residuals_along(tmp_path):
    uninterrupted, _ = fit(HOST, tmp_path, "O2")
    saved = torch.load(tmp_path / "O2-epoch=0.ckpt", weights_only=True)
    for name, weights in (
        ("whole", saved["state_dict"]),
        ("rounded", {k: v.bfloat16().float() for k, v in saved["state_dict"].items()}),
    ):
        torch.save({**saved, "state_dict": weights}, tmp_path / f"{name}.ckpt")
        resumed, _ = fit(HOST, tmp_path / name, "O2", ckpt_path=tmp_path / f"{name}.ckpt")
        assert same(resumed, uninterrupted) == (name == "whole")


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory):
    """``in_bf16(host)``: the weights of a run that nothing interrupts."""

    @functools.cache
    def run(host):
        return fit(host, tmp_path_factory.mktemp("whole"), "bf16-mixed")[0]

    return run


@each_trainer
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("O2", "32-true"),
        ("O3", "bf16-mixed"),
        ("32-true", "O2"),
        ("bf16-mixed", "O3"),
        ("O1", "O2"),
        ("O2", "O1"),
        ("O2", "O3"),
    ],
)
def test_precision_changes_between_runs(host, tmp_path, in_bf16, first, then):
    fit(host, tmp_path, first)
    path = tmp_path / f"{first}-epoch=1.ckpt"
    resumed, trainer = fit(host, tmp_path / "resumed", then, ckpt_path=path)
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, Float8Optimizer) == (then in ("O2", "O3"))
    assert {state["step"].item() for state in optimizer.state.values()} == {EPOCHS * STEPS}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.7 ** (EPOCHS * STEPS // 4))
    assert {tensor.dtype for tensor in resumed.values()} == {torch.float32}
    assert_close(resumed, in_bf16(host))


@each_trainer
def test_checkpoint_after_the_fit_has_whole_weights_and_resumes_exactly(host, tmp_path):
    uninterrupted, _ = fit(host, tmp_path, "O2")
    half, trainer = fit(host, tmp_path, "O2", max_epochs=2)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert torch.equal(saved["state_dict"]["net.0.weight"], half["0.weight"])
    resumed, _ = fit(host, tmp_path, "O2", ckpt_path=tmp_path / "after.ckpt")
    assert same(resumed, uninterrupted)


@each_trainer
def test_merged_weights_of_a_running_fit_are_those_after_it(host, tmp_path):
    # What a user does who wants float32 weights of a run that is still going.
    fit(host, tmp_path, "O2", max_epochs=1)
    merged = []

    class Merge(host.Callback):
        def on_train_end(self, trainer, module):
            merged.append(torch_fp8.merged_state_dict(module.net, trainer.optimizers))

    after, _ = fit(host, tmp_path, "O2", max_epochs=1, callbacks=[Merge()])
    assert same(merged[0], after)


# -- Fabric --------------------------------------------------------------------------------------


def start(host, precision):
    if precision in ("O1", "O2", "O3"):
        chosen = {"plugins": [FP8Precision(FP8Config(opt_level=precision))]}
    else:
        chosen = {"precision": precision}
    fabric = host.Fabric(accelerator="cpu", devices=1, **chosen)
    net = make_net()
    optimizer = AdamW(net.parameters(), lr=1e-3)
    scheduler = StepLR(optimizer, 4, gamma=0.7)
    model, optimizer = fabric.setup(net, optimizer)
    return fabric, {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(fabric, state, steps):
    for batch in batches().split(8)[steps]:
        state["optimizer"].zero_grad()
        fabric.backward(loss(state["model"], batch))
        fabric.clip_gradients(state["model"], state["optimizer"], max_norm=0.1)
        state["optimizer"].step()
        state["scheduler"].step()
    optimizer = state["optimizer"].optimizer
    return torch_fp8.merged_state_dict(state["model"].module, optimizer)


@each_fabric
@each_level
def test_fabric_resumes_exactly(host, tmp_path, level):
    fabric, state = start(host, level)
    uninterrupted = train(fabric, state, slice(0, 6))
    fabric, state = start(host, level)
    train(fabric, state, slice(0, 3))
    fabric.save(tmp_path / "half.ckpt", state)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert saved["model"]["0.weight"].dtype == torch.float32
    assert "residual" not in saved["optimizer"]["state"][0]

    fabric, state = start(host, level)
    train(fabric, state, slice(3, 5))  # whatever is there is replaced
    fabric.load(tmp_path / "half.ckpt", state)
    assert same(train(fabric, state, slice(3, 6)), uninterrupted)


@each_fabric
@pytest.mark.parametrize(
    ("first", "then"), [("O2", "32-true"), ("O3", "bf16-mixed"), ("32-true", "O2"), ("O2", "O1")]
)
def test_fabric_checkpoint_opens_at_another_precision(host, tmp_path, first, then):
    fabric, state = start(host, "bf16-mixed")
    whole = train(fabric, state, slice(0, 6))
    fabric, state = start(host, first)
    train(fabric, state, slice(0, 3))
    fabric.save(tmp_path / "half.ckpt", state)
    fabric, state = start(host, then)
    fabric.load(tmp_path / "half.ckpt", state)
    resumed = train(fabric, state, slice(3, 6))
    assert state["optimizer"].optimizer.state_dict()["state"][0]["step"] == 6
    assert_close(resumed, whole)
