"""`FP8Config(bf16_last=...)` in the Trainer: when the forward changes, and who has to say it."""

import pytest
from torch import nn

import torch_fp8
from lightning_fp8 import FP8Config, FP8Precision
from tests.lightning_fp8.hosts import each_fabric, each_trainer, make_net
from tests.lightning_fp8.test_trainer import data, fit, make_model, make_trainer

CONFIG = FP8Config(bf16_last=0.25)


def watched(host):
    """Return a model that notes the precision of each training and validation forward."""
    model = make_model(host)
    model.forwards = []
    model.net.register_forward_pre_hook(
        lambda net, _: model.forwards.append((net.training, net[0].fp8.recipe.bf16_forward))
    )
    return model


def _training(model):
    return [in_bf16 for training, in_bf16 in model.forwards if training]


@each_trainer
def test_the_last_quarter_runs_in_bf16(host, log):
    model, _ = fit(host, CONFIG, model=watched(host), max_epochs=2, accumulate_grad_batches=2)
    # 2 epochs of 8 batches, two batches a step: the last 2 of 8 steps
    assert _training(model) == [False] * 12 + [True] * 4
    evaluated = [in_bf16 for training, in_bf16 in model.forwards if not training]
    assert evaluated == [False, True]
    assert type(model.net[0]) is nn.Linear  # a stock model again
    assert log().count("the forward runs in BF16 from step 7 of 8 on") == 1


@each_trainer
def test_a_resumed_fit_is_in_bf16_where_it_was(host, tmp_path):
    model, _ = fit(host, CONFIG, model=watched(host), max_steps=8, max_epochs=-1)
    assert _training(model) == [False] * 6 + [True] * 2
    path = tmp_path / "middle.ckpt"
    partly = make_trainer(host, CONFIG, max_steps=7, max_epochs=-1)
    partly.fit(watched(host), data(), data(1))
    partly.save_checkpoint(path)
    resumed = watched(host)
    make_trainer(host, CONFIG, max_steps=8, max_epochs=-1).fit(resumed, data(), ckpt_path=path)
    assert _training(resumed) == [True]


@each_trainer
def test_manual_optimization_and_endless_fits_are_refused(host):
    model = make_model(host)
    model.automatic_optimization = False
    with pytest.raises(ValueError, match="manual optimization does not know how many"):
        fit(host, CONFIG, model=model)
    with pytest.raises(ValueError, match=r"torch_fp8\.set_forward_precision\(model, 'bf16'\)"):
        fit(host, CONFIG, max_epochs=-1)


@each_fabric
def test_fabric_is_refused_with_the_way_out(host):
    fabric = host.Fabric(accelerator="cpu", devices=1, plugins=[FP8Precision(CONFIG)])
    with pytest.raises(ValueError, match="Fabric does not know how many"):
        fabric.setup_module(make_net())
    fabric = host.Fabric(accelerator="cpu", devices=1, plugins=[FP8Precision()])
    module = fabric.setup_module(make_net())
    assert torch_fp8.set_forward_precision(module, "bf16") == 2
