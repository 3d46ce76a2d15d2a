"""Checkpoints: stock keys and plain tensors, both directions, and an exact resume."""

import warnings

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Config, FP8Precision
from torch_fp8 import Float8Linear, merged_state_dict
from torch_fp8.tensor.split_weight import SplitWeight

each_trainer = pytest.mark.parametrize(
    "host", [lightning.pytorch, pytorch_lightning], ids=lambda host: host.__name__
)
each_fabric = pytest.mark.parametrize(
    "host", [lightning.fabric, lightning_fabric], ids=lambda host: host.__name__
)
DELAYED = FP8Config(recipe="delayed", amax_history_len=4)

# Continues a run in Lightning as it is, on a machine where this package does not exist.
STOCK = """
import importlib, sys
for ours in ("torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8", "_fp8_autoload"):
    sys.modules[ours] = None
host, path = sys.argv[1:]
L = importlib.import_module(host)
import torch
from torch import nn
from torch.utils.data import DataLoader

class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
    def training_step(self, batch, batch_idx):
        return self.net(batch).float().pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

saved = torch.load(path, weights_only=True)
model = Regression()
assert list(saved["state_dict"]) == list(model.state_dict())
assert {type(t) for t in saved["state_dict"].values()} == {torch.Tensor}
trainer = L.Trainer(
    accelerator="cpu", precision="bf16-mixed", max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, DataLoader(torch.randn(8, 32), batch_size=4), ckpt_path=path)
assert trainer.global_step == 8 + 2, trainer.global_step
"""


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))


def batches(num=8):
    """Batches whose size in value falls: old amaxes matter to delayed scaling."""
    torch.manual_seed(1)
    return [torch.randn(4, 32) * 2.0 ** (-i / 2) for i in range(num)]


def make_model(host):
    class Regression(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch, batch_idx):
            assert isinstance(self.net[0], Float8Linear)
            return self.net(batch).float().pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Regression()


def fit(host, tmp_path, config, max_epochs, ckpt_path=None, save_to=None, **options):
    weights_only, callbacks = options.get("weights_only", False), options.get("callbacks", ())
    trainer = host.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[FP8Precision(config)],
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = make_model(host)
    trainer.fit(model, DataLoader(torch.cat(batches()), batch_size=4), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to, weights_only=weights_only)
    return model.state_dict()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


@each_trainer
@pytest.mark.parametrize(
    "config",
    [FP8Config(opt_level="O1"), FP8Config(recipe="rowwise"), DELAYED, FP8Config(opt_level="O3")],
    ids=lambda config: f"{config.recipe} {config.opt_level}",
)
def test_resumed_training_equals_the_uninterrupted_run(host, tmp_path, config):
    uninterrupted = fit(host, tmp_path, config, max_epochs=2)
    fit(host, tmp_path, config, max_epochs=1, save_to=tmp_path / "half.ckpt")
    resumed = fit(host, tmp_path, config, max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    assert same(resumed, uninterrupted)


def test_resume_without_the_history_would_differ(tmp_path):
    # The data of the test above does tell whether the history came back.
    host = lightning.pytorch
    uninterrupted = fit(host, tmp_path, DELAYED, max_epochs=2)
    fit(host, tmp_path, DELAYED, max_epochs=1, save_to=tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    del saved["FP8Precision"]
    torch.save(saved, tmp_path / "without.ckpt")
    resumed = fit(host, tmp_path, DELAYED, max_epochs=2, ckpt_path=tmp_path / "without.ckpt")
    assert not same(resumed, uninterrupted)


def test_checkpoint_of_one_copy_of_lightning_resumes_in_the_other(tmp_path):
    uninterrupted = fit(pytorch_lightning, tmp_path, DELAYED, max_epochs=2)
    fit(lightning.pytorch, tmp_path, DELAYED, max_epochs=1, save_to=tmp_path / "half.ckpt")
    path = tmp_path / "half.ckpt"
    assert same(fit(pytorch_lightning, tmp_path, DELAYED, 2, ckpt_path=path), uninterrupted)


@each_trainer
@pytest.mark.parametrize("config", [FP8Config(), DELAYED], ids=lambda config: config.recipe)
def test_checkpoint_has_stock_keys_and_plain_tensors(host, tmp_path, config):
    fit(host, tmp_path, config, max_epochs=1, save_to=tmp_path / "ours.ckpt")
    saved = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(make_model(host).state_dict())
    assert {type(tensor) for tensor in saved["state_dict"].values()} == {torch.Tensor}
    assert ("FP8Precision" in saved) == (config.recipe == "delayed")
    assert len(saved["optimizer_states"][0]["state"]) == 4


@each_trainer
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_checkpoint_of_a_running_fit_has_whole_weights_and_resumes_exactly(
    host, tmp_path, level, log
):
    config = FP8Config(opt_level=level)
    every = host.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1)
    whole = fit(host, tmp_path, config, max_epochs=1, callbacks=[every])
    saved = torch.load(tmp_path / "step=8.ckpt", weights_only=True)
    assert {tensor.dtype for tensor in saved["state_dict"].values()} == {torch.float32}
    assert same(saved["state_dict"], whole)
    assert "saved whole" not in log()  # they are
    resumed = fit(host, tmp_path, config, max_epochs=2, ckpt_path=tmp_path / "step=8.ckpt")
    assert same(resumed, fit(host, tmp_path, config, max_epochs=2))


@each_trainer
def test_checkpoint_that_is_restored_within_a_fit_changes_nothing(host, tmp_path):
    """As the learning rate finder does it."""

    class Restores(host.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            before = [p.clone() for p in module.parameters()]
            assert isinstance(module.net[0].weight, SplitWeight)
            trainer.save_checkpoint(tmp_path / "within.ckpt")
            trainer._checkpoint_connector.restore(tmp_path / "within.ckpt")
            assert all(map(torch.equal, before, module.parameters()))

    config = FP8Config()
    through = fit(host, tmp_path, config, max_epochs=1)
    assert same(fit(host, tmp_path, config, max_epochs=1, callbacks=[Restores()]), through)


@pytest.mark.long
@each_trainer
def test_checkpoint_opens_in_stock_lightning_without_this_package(run, tmp_path, host):
    path = tmp_path / "ours.ckpt"
    fit(host, tmp_path, DELAYED, max_epochs=1, save_to=path)
    (stock,) = run(["-c", STOCK, host.__name__, str(path), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}])
    assert stock.returncode == 0, stock.output


@each_trainer
@pytest.mark.parametrize("config", [FP8Config(), DELAYED], ids=lambda config: config.recipe)
def test_stock_checkpoint_opens_here(host, tmp_path, config):
    trainer = host.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = make_model(host)
    model.training_step = lambda batch, batch_idx: model.net(batch).float().pow(2).mean()
    trainer.fit(model, DataLoader(torch.cat(batches()), batch_size=4))
    trainer.save_checkpoint(tmp_path / "stock.ckpt")
    resumed = fit(host, tmp_path, config, max_epochs=2, ckpt_path=tmp_path / "stock.ckpt")
    assert not same(resumed, model.state_dict())
    assert len(resumed) == len(model.state_dict())


def test_history_that_the_recipe_does_not_use_is_warned_about(tmp_path):
    host = lightning.pytorch
    fit(host, tmp_path, DELAYED, max_epochs=1, save_to=tmp_path / "delayed.ckpt")
    with pytest.warns(UserWarning, match="which is not used: the recipe is 'rowwise'"):
        fit(host, tmp_path, FP8Config(recipe="rowwise"), 2, ckpt_path=tmp_path / "delayed.ckpt")


def test_history_of_single_layers_is_used_without_a_warning(tmp_path):
    host = lightning.pytorch
    config = FP8Config(recipe="rowwise", overrides={"net.0": {"recipe": "delayed"}})
    fit(host, tmp_path, config, max_epochs=1, save_to=tmp_path / "delayed.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*which is not used")
        fit(host, tmp_path, config, 2, ckpt_path=tmp_path / "delayed.ckpt")


def test_history_of_another_length_is_refused(tmp_path):
    host = lightning.pytorch
    fit(host, tmp_path, DELAYED, max_epochs=1, save_to=tmp_path / "delayed.ckpt")
    other = FP8Config(recipe="delayed", amax_history_len=8)
    with pytest.raises(ValueError, match="was it saved with another amax_history_len"):
        fit(host, tmp_path, other, 2, ckpt_path=tmp_path / "delayed.ckpt")


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "level"),
    [("ddp", "O1"), ("ddp", "O3"), ("model_parallel", "O2"), ("model_parallel", "O3")],
)
def test_two_ranks_resume_exactly_with_delayed_scaling(run, tmp_path, strategy, level):
    # Each rank has a history of its own.
    (resumed,) = run(["resume.py", strategy, str(tmp_path), level])
    assert resumed.returncode == 0, resumed.output
    assert "stay float32" not in resumed.output


def test_state_of_another_number_of_ranks_is_taken_over():
    fabric, state = start(lightning.fabric, DELAYED)
    train(fabric, state, batches())
    (of_rank,) = state["precision"].state_dict()["scaling"]
    other = [{k: torch.full_like(v, k.endswith("scale")) for k, v in s.items()} for s in of_rank]
    state["precision"].load_state_dict({"scaling": [other, of_rank]})
    (loaded,) = state["precision"].state_dict()["scaling"]
    assert same(loaded[0], other[0])


# -- Fabric ------------------------------------------------------------------------------------


def start(host, config):
    fabric = host.Fabric(accelerator="cpu", devices=1, plugins=[FP8Precision(config)])
    net = make_net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return fabric, {"model": model, "optimizer": optimizer, "precision": fabric.strategy.precision}


def train(fabric, state, steps):
    for batch in steps:
        state["optimizer"].zero_grad()
        fabric.backward(state["model"](batch).pow(2).mean())
        state["optimizer"].step()
    return state["model"].state_dict()


@each_fabric
@pytest.mark.parametrize("config", [FP8Config(), DELAYED], ids=lambda config: config.recipe)
def test_fabric_resumes_exactly_with_the_plugin_in_the_state(host, tmp_path, config):
    fabric, state = start(host, config)
    uninterrupted = train(fabric, state, batches())

    fabric, state = start(host, config)
    train(fabric, state, batches()[:4])
    fabric.save(tmp_path / "half.ckpt", state)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert list(saved["model"]) == list(make_net().state_dict())
    assert {type(tensor) for tensor in saved["model"].values()} == {torch.Tensor}
    assert {tensor.dtype for tensor in saved["model"].values()} == {torch.float32}
    assert same(saved["model"], merged_state_dict(state["model"].module, state["optimizer"]))

    fabric, state = start(host, config)
    fabric.load(tmp_path / "half.ckpt", state)
    assert same(train(fabric, state, batches()[4:]), uninterrupted)


def test_fabric_state_of_several_models_belongs_to_each(tmp_path):
    fabric, state = start(lightning.fabric, DELAYED)
    second = fabric.setup(make_net())
    train(fabric, state, batches())
    second(torch.ones(4, 32))
    saved = state["precision"].state_dict()
    first_history, second_history = (s["0.amax_history"] for s in saved["scaling"][0])
    assert second_history[0, 0] == 1
    assert not torch.equal(first_history, second_history)

    fabric, state = start(lightning.fabric, DELAYED)
    with pytest.raises(ValueError, match="of 2 model\\(s\\), but 1 are set up"):
        state["precision"].load_state_dict(saved)
    state["second"] = fabric.setup(make_net())
    state["precision"].load_state_dict(saved)
    for old, new in zip(
        saved["scaling"][0], state["precision"].state_dict()["scaling"][0], strict=True
    ):
        assert same(old, new)
