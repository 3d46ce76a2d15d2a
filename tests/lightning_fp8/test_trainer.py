import functools

import lightning.pytorch
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Config, FP8Precision
from tests.internals import Float8Optimizer, is_released
from tests.lightning_fp8.hosts import QUIET, each_trainer, make_net

each_level = pytest.mark.parametrize("level", ["O2", "O3"])
HOST = lightning.pytorch


def make_model(host, configure_optimizers=None):
    class Regression(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()
            self.dtypes, self.rates, self.gradients, self.norms = [], [], [], []

        def training_step(self, batch, batch_idx):
            self.dtypes.append(self.net[0].weight.dtype)
            return (self.net(batch) - batch).float().pow(2).mean()

        def validation_step(self, batch, batch_idx):
            self.dtypes.append(self.net[0].weight.dtype)
            self.log("loss", (self.net(batch) - batch).float().pow(2).mean())

        test_step = validation_step

        def on_before_optimizer_step(self, optimizer):
            self.rates += [group["lr"] for group in optimizer.param_groups]
            self.gradients.append(type(self.net[0].weight.grad).__name__)

        def configure_gradient_clipping(self, optimizer, *args, **kwargs):
            super().configure_gradient_clipping(optimizer, *args, **kwargs)
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            if gradients and not is_released(self.net[0].weight):
                self.norms.append(torch.nn.utils.get_total_norm(gradients))

        def configure_optimizers(self):
            if configure_optimizers is not None:
                return configure_optimizers(self)
            return AdamW(self.parameters(), lr=1e-2)

    return Regression()


def data(num=8):
    torch.manual_seed(1)
    return DataLoader(torch.randn(8 * num, 64), batch_size=8)


def make_trainer(host, level, max_epochs=1, **kwargs):
    config = level if isinstance(level, FP8Config) else FP8Config(opt_level=level)
    options = {"max_epochs": max_epochs, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    return host.Trainer(plugins=[FP8Precision(config)], **{**QUIET, **options, **kwargs})


def fit(host, level, configure_optimizers=None, max_epochs=1, model=None, **kwargs):
    model = make_model(host, configure_optimizers) if model is None else model
    trainer = make_trainer(host, level, max_epochs, **kwargs)
    trainer.fit(model, data(), data(1))
    return model, trainer


def assert_stock(model):
    """A model as the user made it, with weights that have more bits than BF16."""
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert {type(m) for m in model.net} == {nn.Linear, nn.ReLU, nn.LayerNorm}
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert (model.net[0].weight != model.net[0].weight.bfloat16().float()).any()
    assert model.net(torch.ones(2, 64)).dtype == torch.float32


# -- which weights, when -------------------------------------------------------------------------


@each_trainer
@each_level
def test_weights_are_split_while_it_fits_and_whole_after(host, level, log):
    kept = []

    def configure(model):
        kept.append(AdamW(model.parameters(), lr=1e-2))
        return kept

    model = make_model(host, configure)
    parameters = list(model.parameters())
    model, trainer = fit(host, level, model=model)
    assert set(model.dtypes) == {torch.float32}
    assert trainer.optimizers[0] is kept[0]
    assert isinstance(kept[0], Float8Optimizer)
    assert kept[0].state[parameters[0]]["exp_avg"].qdata.dtype == torch.uint8
    assert set(model.gradients) == {"Float8Grad" if level == "O3" else "WideGrad"}
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_stock(model)
    assert log().count("optimizer AdamW with 8-bit states") == 1
    assert f"{'7.30' if level == 'O2' else '6.36'} bytes per parameter, 16.00 before" in log()


@each_trainer
def test_model_is_whole_after_an_exception_in_training(host):
    model = make_model(host)

    def fail(*args):
        if len(model.dtypes) == 4:
            raise KeyError

    model.on_train_batch_end = fail
    with pytest.raises(KeyError):
        make_trainer(host, "O3").fit(model, data())
    assert len(model.dtypes) == 4
    assert_stock(model)


@each_level
def test_second_fit_goes_on_where_the_first_ended(level):
    # The optimizer is the user's and lives on; a new epoch needs a fit loop that has one.
    model = make_model(HOST)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model.configure_optimizers = lambda: optimizer
    trainer = make_trainer(HOST, level)
    trainer.fit(model, data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data())
    assert optimizer.state[model.net[0].weight]["step"] == 16

    other = make_model(HOST)
    fit(HOST, level, max_epochs=2, model=other)
    assert torch.equal(model.net[0].weight, other.net[0].weight)


# -- loops ---------------------------------------------------------------------------------------


def manual(host, several):
    class Manual(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = make_net()

        def training_step(self, batch, batch_idx):
            loss = (self.net(batch) - batch).float().pow(2).mean()
            optimizers = self.optimizers() if several else [self.optimizers()]
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                assert isinstance(optimizer, Float8Optimizer) or self.level == "O1"
                self.clip_gradients(optimizer, 0.5, gradient_clip_algorithm="norm")
                optimizer.step()
            schedulers = self.lr_schedulers()
            for scheduler in schedulers if several else [schedulers]:
                scheduler.step()

        def configure_optimizers(self):
            parts = [self.net[0], self.net[2:]] if several else [self.net]
            optimizers = [AdamW(part.parameters(), lr=1e-2) for part in parts]
            return optimizers, [StepLR(optimizer, 4, gamma=0.5) for optimizer in optimizers]

    return Manual()


def plateau(model):
    optimizer = Adam(model.parameters(), lr=1e-2)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


def step_lr(model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]
    optimizer = AdamW(groups, lr=1e-2)
    scheduler = {"scheduler": StepLR(optimizer, 2, gamma=0.5), "interval": "step"}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


LOOPS = {
    "clip norm": {"gradient_clip_val": 0.1},
    "clip value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulate": {"accumulate_grad_batches": 3},
    "scheduler per step": {"configure_optimizers": step_lr},
    "plateau": {"configure_optimizers": plateau},
}


def displacement(model):
    start = make_net()
    return torch.cat(
        [(a - b).flatten() for a, b in zip(model.net.parameters(), start.parameters(), strict=True)]
    )


def assert_follows(model, reference, cosine=0.97):
    """The same way as with float32 states, from the same start and data.

    Measured here: cosine 0.983 and more, 0.935 where gradients are clipped by value (which leaves
    little but their sign); norm within 1 %.
    """
    ours, theirs = displacement(model), displacement(reference)
    assert torch.cosine_similarity(ours, theirs, dim=0) > cosine
    torch.testing.assert_close(ours.norm(), theirs.norm(), rtol=0.02, atol=0)


@functools.cache
def fit_with_float32_states(loop):
    return fit(HOST, "O1", max_epochs=3, **LOOPS[loop])[0]


@each_level
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_with_automatic_optimization_follows_float32_states(level, loop):
    model, _ = fit(HOST, level, max_epochs=3, **LOOPS[loop])
    reference = fit_with_float32_states(loop)
    assert set(model.dtypes) == {torch.float32}
    assert model.rates == reference.rates
    # Of the first gradients, after clipping; the smaller of a group have 4 significand bits.
    torch.testing.assert_close(model.norms[0].float(), reference.norms[0], rtol=2**-5, atol=0)
    assert_follows(model, reference, 0.92 if loop == "clip value" else 0.97)


@each_level
@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "two optimizers"])
def test_loop_with_manual_optimization_follows_float32_states(level, several):
    models = []
    for chosen in (level, "O1"):
        models.append(manual(HOST, several))
        models[-1].level = chosen
        make_trainer(HOST, chosen, 3).fit(models[-1], data())
    assert_follows(*models)


# -- optimizers that are not converted -----------------------------------------------------------


@each_trainer
def test_option_that_a_level_cannot_have_is_refused_with_the_way_out(host):
    model = make_model(host, lambda model: AdamW(model.parameters(), amsgrad=True))
    with pytest.raises(ValueError, match=r"amsgrad=True.*opt_level='O1'"):
        make_trainer(host, "O2").fit(model, data())
    assert type(model.net[0]) is nn.Linear
    assert model.net[0].weight.dtype == torch.float32


def test_optimizers_that_share_weights_are_left_alone(log):
    model = manual(HOST, several=True)
    model.level = "O1"

    def configure():
        everything = AdamW(model.parameters(), lr=1e-2)
        first = AdamW(model.net[0].parameters(), lr=1e-2)
        return [everything, first], [StepLR(first, 4), StepLR(everything, 4)]

    model.configure_optimizers = configure
    make_trainer(HOST, "O2").fit(model, data())
    assert log().count("keeps its own states: another optimizer has some of its weights") == 2


def test_fit_without_optimizers(log):
    model, _ = fit(HOST, "O2", lambda model: None)
    assert set(model.dtypes) == {torch.float32}
    assert "FP8: 2 of 2" in log()


@each_level
@pytest.mark.parametrize(
    "make", [lambda p: AdamW(p, lr=1e-6), lambda p: SGD(p, lr=1e-3)], ids=["AdamW", "SGD"]
)
def test_an_optimizer_that_is_exchanged_in_a_fit_trains_all_bits(make, level):
    model, before = make_model(HOST), []

    def exchange():
        if model.current_epoch == 1:
            model.trainer.optimizers = [make(model.parameters())]
            before.append(model.net[0].weight.detach().clone())

    model.on_train_epoch_start = exchange
    fit(HOST, level, max_epochs=2, model=model)
    moved = model.net[0].weight != before[0]
    assert moved.float().mean() > 0.8  # of BF16 alone next to none
    assert_stock(model)


# -- gradient release ----------------------------------------------------------------------------

RELEASE = FP8Config(opt_level="O3", gradient_release=True)


@each_trainer
def test_gradient_release_equals_the_run_without(host):
    model, _ = fit(host, RELEASE, detect_anomaly=True)
    other, _ = fit(host, "O3")
    assert set(model.gradients) == {"ReleasedGrad"}
    assert torch.equal(model.net[0].weight, other.net[0].weight)
    assert_stock(model)


@each_trainer
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"gradient_clip_val": 1.0}, "cannot clip gradients"),
        ({"accumulate_grad_batches": 2}, "gradient accumulation"),
    ],
    ids=["clipping", "accumulation"],
)
def test_gradient_release_is_refused_by_name(host, arguments, name):
    with pytest.raises((RuntimeError, ValueError), match=rf"gradient_release=True.*{name}"):
        fit(host, RELEASE, **arguments)


def test_gradient_release_refuses_clipping_in_a_hook():
    model = make_model(HOST)
    model.configure_gradient_clipping = lambda optimizer, *args, **kwargs: model.clip_gradients(
        optimizer, 1.0, "norm"
    )
    with pytest.raises(ValueError, match=r"gradient_release=True.*cannot clip"):
        make_trainer(HOST, RELEASE).fit(model, data())
