import functools
import importlib
import warnings

import lightning.fabric
import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Config, FP8Precision
from tests.internals import Float8Optimizer, SplitWeight
from tests.lightning_fp8.hosts import QUIET, make_net, one_fabric, one_trainer
from torch_fp8 import Float8Linear, merged_state_dict

HOST = lightning.pytorch
EPOCHS, STEPS = 3, 6
DELAYED = FP8Config(recipe="delayed", amax_history_len=4)
O1, O2, O3 = (FP8Config(opt_level=level) for level in ("O1", "O2", "O3"))
each_config = pytest.mark.parametrize(
    "config",
    [O1, FP8Config(recipe="rowwise"), DELAYED, O3],
    ids=lambda config: f"{config.recipe} {config.opt_level}",
)


def batches():
    torch.manual_seed(1)
    return [torch.randn(8, 64) * 2.0 ** (-i / 2) for i in range(STEPS)]


def loss(net, batch):
    return (net(batch) - batch).float().pow(2).mean()


def chosen(precision):
    if isinstance(precision, FP8Config):
        return {"plugins": [FP8Precision(precision)]}
    return {"precision": precision}


def fit(host, folder, precision, max_epochs=EPOCHS, ckpt_path=None, callbacks=()):
    class Regression(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch, batch_idx):
            assert isinstance(self.net[0], Float8Linear) == isinstance(precision, FP8Config)
            return loss(self.net, batch)

        def configure_optimizers(self):
            optimizer = AdamW(self.parameters(), lr=1e-3)
            scheduler = {"scheduler": StepLR(optimizer, 4, gamma=0.7), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    checkpoint = importlib.import_module(f"{host.__name__}.callbacks").ModelCheckpoint(
        dirpath=folder, filename="{epoch}", save_top_k=-1
    )
    options = {"max_epochs": max_epochs, "callbacks": [checkpoint, *callbacks]}
    trainer = host.Trainer(**options, **QUIET, **chosen(precision))
    model = Regression()
    trainer.fit(model, DataLoader(torch.cat(batches()), batch_size=8), ckpt_path=ckpt_path)
    return model.state_dict(), trainer


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


def assert_close(a, b):
    """Two ways of a few steps of 1e-3 from the same weights, one of them in fewer bits."""
    start = make_net().state_dict().values()
    a, b = (
        torch.cat([(x - y).flatten() for x, y in zip(s.values(), start, strict=True)])
        for s in (a, b)
    )
    assert torch.cosine_similarity(a, b, dim=0) > 0.95


@one_trainer
@each_config
def test_resumed_training_equals_the_uninterrupted_run(host, tmp_path, config, log):
    uninterrupted, _ = fit(host, tmp_path, config)
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(uninterrupted)
    assert {type(tensor) for tensor in saved["state_dict"].values()} == {torch.Tensor}
    assert {tensor.dtype for tensor in saved["state_dict"].values()} == {torch.float32}
    assert ("FP8Precision" in saved) == (config.recipe == "delayed")
    states = saved["optimizer_states"][0]["state"]
    dtypes = dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), torch.float32)
    assert [{n: t.dtype for n, t in s.items()} for s in states.values()] == [dtypes] * 6
    last = torch.load(tmp_path / f"epoch={EPOCHS - 1}.ckpt", weights_only=True)
    assert same(last["state_dict"], uninterrupted)
    assert "saved whole" not in log()  # they are

    half, trainer = fit(host, tmp_path / "half", config, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    after = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert same(after["state_dict"], half)
    for path in (tmp_path / "epoch=0.ckpt", tmp_path / "after.ckpt"):
        resumed, trainer = fit(host, tmp_path / "resumed", config, ckpt_path=path)
        assert trainer.global_step == EPOCHS * STEPS
        assert same(resumed, uninterrupted)


def test_checkpoint_of_one_copy_of_lightning_resumes_in_the_other(tmp_path):
    uninterrupted, _ = fit(pytorch_lightning, tmp_path, DELAYED)
    fit(lightning.pytorch, tmp_path / "other", DELAYED, max_epochs=1)
    path = tmp_path / "other" / "epoch=0.ckpt"
    assert same(fit(pytorch_lightning, tmp_path, DELAYED, ckpt_path=path)[0], uninterrupted)


def test_whole_weights_bring_the_residuals_along(tmp_path):
    uninterrupted, _ = fit(HOST, tmp_path, O2)
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    for name, weights in (
        ("whole", saved["state_dict"]),
        ("rounded", {k: v.bfloat16().float() for k, v in saved["state_dict"].items()}),
    ):
        torch.save({**saved, "state_dict": weights}, tmp_path / f"{name}.ckpt")
        resumed, _ = fit(HOST, tmp_path / name, O2, ckpt_path=tmp_path / f"{name}.ckpt")
        assert same(resumed, uninterrupted) == (name == "whole")


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory):
    """``in_bf16(host)``: the weights of a run that nothing interrupts."""

    @functools.cache
    def run(host):
        return fit(host, tmp_path_factory.mktemp("whole"), "bf16-mixed")[0]

    return run


@one_trainer
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (O2, "32-true"),
        (O3, "bf16-mixed"),
        (DELAYED, "bf16-mixed"),
        ("32-true", O2),
        ("bf16-mixed", O3),
        ("bf16-mixed", DELAYED),
        (O1, O2),
        (O2, O1),
        (O2, O3),
    ],
    ids=lambda value: getattr(value, "opt_level", value),
)
def test_precision_changes_between_runs(host, tmp_path, in_bf16, first, then):
    fit(host, tmp_path, first)
    path = tmp_path / "epoch=1.ckpt"
    resumed, trainer = fit(host, tmp_path / "resumed", then, ckpt_path=path)
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, Float8Optimizer) == (then in (O2, O3, DELAYED))
    assert {state["step"].item() for state in optimizer.state.values()} == {EPOCHS * STEPS}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.7 ** (EPOCHS * STEPS // 4))
    assert {tensor.dtype for tensor in resumed.values()} == {torch.float32}
    assert_close(resumed, in_bf16(host))


@one_trainer
def test_checkpoint_within_a_fit_can_be_restored_and_merged(host, tmp_path):
    """As the learning rate finder does it, and a user who wants float32 weights before the end."""
    merged = []

    class Restores(host.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            before = [p.clone() for p in module.parameters()]
            assert isinstance(module.net[0].weight, SplitWeight)
            trainer.save_checkpoint(tmp_path / "within.ckpt")
            trainer._checkpoint_connector.restore(tmp_path / "within.ckpt")
            assert all(map(torch.equal, before, module.parameters()))

        def on_train_end(self, trainer, module):
            merged.append(merged_state_dict(module.net, trainer.optimizers))

    through, _ = fit(host, tmp_path, O2, max_epochs=1)
    restored, _ = fit(host, tmp_path, O2, max_epochs=1, callbacks=[Restores()])
    assert same(restored, through)
    assert same(merged[0], through)


@pytest.fixture
def delayed(tmp_path):
    fit(HOST, tmp_path, DELAYED, max_epochs=1)
    return tmp_path / "epoch=0.ckpt"


def test_history_that_the_recipe_does_not_use_is_warned_about(tmp_path, delayed):
    with pytest.warns(UserWarning, match="which is not used: the recipe is 'rowwise'"):
        fit(HOST, tmp_path, FP8Config(recipe="rowwise"), 2, ckpt_path=delayed)


def test_history_of_single_layers_is_used_without_a_warning(tmp_path):
    config = FP8Config(recipe="rowwise", overrides={"net.0": {"recipe": "delayed"}})
    fit(HOST, tmp_path, config, max_epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*which is not used")
        fit(HOST, tmp_path, config, 2, ckpt_path=tmp_path / "epoch=0.ckpt")


def test_history_of_another_length_is_refused(tmp_path, delayed):
    other = FP8Config(recipe="delayed", amax_history_len=8)
    with pytest.raises(ValueError, match="was it saved with another amax_history_len"):
        fit(HOST, tmp_path, other, 2, ckpt_path=delayed)


# -- Fabric ------------------------------------------------------------------------------------


def start(host, precision):
    fabric = host.Fabric(accelerator="cpu", devices=1, **chosen(precision))
    net = make_net()
    optimizer = AdamW(net.parameters(), lr=1e-3)
    scheduler = StepLR(optimizer, 4, gamma=0.7)
    model, optimizer = fabric.setup(net, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return fabric, {**state, "precision": fabric.strategy.precision}


def train(fabric, state, steps):
    for batch in batches()[steps]:
        state["optimizer"].zero_grad()
        fabric.backward(loss(state["model"], batch))
        fabric.clip_gradients(state["model"], state["optimizer"], max_norm=0.1)
        state["optimizer"].step()
        state["scheduler"].step()
    return merged_state_dict(state["model"], state["optimizer"].optimizer)  # through its wrapper


@one_fabric
@each_config
def test_fabric_resumes_exactly_with_the_plugin_in_the_state(host, tmp_path, config):
    fabric, state = start(host, config)
    uninterrupted = train(fabric, state, slice(0, 6))
    fabric, state = start(host, config)
    half = train(fabric, state, slice(0, 3))
    fabric.save(tmp_path / "half.ckpt", state)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert list(saved["model"]) == list(make_net().state_dict())
    assert {type(tensor) for tensor in saved["model"].values()} == {torch.Tensor}
    assert {tensor.dtype for tensor in saved["model"].values()} == {torch.float32}
    assert same(saved["model"], half)
    assert "residual" not in saved["optimizer"]["state"][0]

    fabric, state = start(host, config)
    train(fabric, state, slice(3, 5))  # whatever is there is replaced
    fabric.load(tmp_path / "half.ckpt", state)
    assert same(train(fabric, state, slice(3, 6)), uninterrupted)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_takes_its_own_history_or_one_of_fewer_ranks(monkeypatch, rank):
    fabric, state = start(lightning.fabric, DELAYED)
    train(fabric, state, slice(0, 6))
    (other,) = state["precision"].state_dict()["scaling"]
    own = [{k: torch.full_like(v, k.endswith("scale")) for k, v in s.items()} for s in other]
    of_ranks = [own, other] if rank % 2 == 0 else [other, own]
    with monkeypatch.context() as several:
        several.setattr("lightning_fp8.precision.in_several_ranks", lambda: True)
        several.setattr(torch.distributed, "get_rank", lambda: rank)
        state["precision"].load_state_dict({"scaling": of_ranks})
    (loaded,) = state["precision"].state_dict()["scaling"]
    assert same(loaded[0], own[0])


def test_fabric_state_of_several_models_belongs_to_each():
    fabric, state = start(lightning.fabric, DELAYED)
    second = fabric.setup(make_net())
    train(fabric, state, slice(0, 6))
    second(torch.ones(4, 64))
    saved = state["precision"].state_dict()
    first_history, second_history = (s["0.amax_history"] for s in saved["scaling"][0])
    assert second_history[0, 0] == 1
    assert not torch.equal(first_history, second_history)

    fabric, state = start(lightning.fabric, DELAYED)
    with pytest.raises(ValueError, match="of 2 model\\(s\\), but 1 are set up"):
        state["precision"].load_state_dict(saved)
    state["second"] = fabric.setup(make_net())
    state["precision"].load_state_dict(saved)
    loaded = state["precision"].state_dict()["scaling"][0]
    assert all(map(same, saved["scaling"][0], loaded))
