import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.internals import Float8Optimizer, SplitWeight
from tests.leaving_peak import check_peak_of_leaving
from torch_fp8 import Float8Linear


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 96)
        self.norm = nn.LayerNorm(96)
        self.down = nn.Linear(96, 64)
        self.lm_head = nn.Linear(64, 64)

    def forward(self, x):
        return self.lm_head(self.down(self.norm(self.up(x)).relu()))


def _train(accelerator, model, optimizer, num_steps, *others):
    losses = []
    for step in range(num_steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(x), x)
        accelerator.backward(loss)
        optimizer.step()
        for scheduler in others:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _prepare(accelerator, order, *objects):
    """Prepare model, optimizer and scheduler in one call, or in three, in the order of letters."""
    named = dict(zip("mos", objects, strict=True))
    letters = order.replace(" ", "")
    if " " in order:
        done = [accelerator.prepare(named[letter]) for letter in letters]
    else:
        done = accelerator.prepare(*(named[letter] for letter in letters))
    return [dict(zip(letters, done, strict=True))[letter] for letter in "mos"]


@pytest.fixture
def expected_losses(accelerator_with):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, 10)
    accelerator = accelerator_with()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    return _train(accelerator, model, optimizer, 4, scheduler)


@pytest.mark.parametrize("order", ["mos", "oms", "som", "m o s", "o m s"])
def test_any_order_converts_weights_and_optimizer(accelerator_with, expected_losses, order):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parameters, groups = list(model.parameters()), optimizer.param_groups
    scheduler = CosineAnnealingLR(optimizer, 10)
    accelerator = accelerator_with()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # "lr_scheduler.step before optimizer.step"
        prepared = _prepare(accelerator, order, model, optimizer, scheduler)
        losses = _train(accelerator, prepared[0], prepared[1], 4, prepared[2])
    assert losses == expected_losses
    assert prepared[1].optimizer is optimizer
    assert isinstance(optimizer, Float8Optimizer)
    assert isinstance(optimizer, torch.optim.AdamW)
    if order != "o m s":  # Accelerate reloads the state of a stock optimizer, and so its groups
        assert optimizer.param_groups is groups
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    split = [name for name, p in model.named_parameters() if isinstance(p, SplitWeight)]
    assert split == ["up.weight", "down.weight", "lm_head.weight"]
    assert model.up.weight.residual.any()
    assert scheduler.get_last_lr()[0] == pytest.approx(0.5e-2 * (1 + math.cos(0.4 * math.pi)))


def test_accumulation_steps_once_per_window_and_clipping_clips(accelerator_with):
    accelerator = accelerator_with(gradient_accumulation_steps=4)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    norms = []
    for micro in range(8):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(micro))
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), x))
            if accelerator.sync_gradients:
                measured, before = (
                    accelerator.clip_grad_norm_(model.parameters(), most)
                    for most in (math.inf, 1e-3)
                )
                assert measured == before
                after = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
                norms.append((before.item(), after.item()))
                accelerator.clip_grad_value_(model.parameters(), 1e-5)
                # Clipped in BF16, which a value of 1e-5 is rounded to.
                assert max(p.grad.abs().max() for p in model.parameters()) <= 1.002e-5
            optimizer.step()
            optimizer.zero_grad()
    assert len(norms) == 2
    assert all(before > 1e-2 and after == pytest.approx(1e-3, rel=0.01) for before, after in norms)
    assert optimizer.state[model.up.weight]["step"] == 2


def test_one_optimizer_of_two_models_waits_for_both(accelerator_with):
    accelerator = accelerator_with()
    encoder, decoder = Net(), Net()
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()])
    encoder, _ = accelerator.prepare(encoder, optimizer)
    assert not isinstance(encoder.up.weight, SplitWeight)
    decoder = accelerator.prepare(decoder)
    assert isinstance(optimizer, Float8Optimizer)
    assert {type(encoder.up.weight), type(decoder.up.weight)} == {SplitWeight}


def test_weights_that_run_without_autocast_keep_the_optimizer_as_it_is(accelerator_with, messages):
    accelerator = accelerator_with()
    model, forgotten = Net(), nn.Linear(64, 64)
    optimizer = torch.optim.AdamW([*model.parameters(), *forgotten.parameters()])
    model, prepared = accelerator.prepare(model, optimizer)
    prepared.zero_grad()
    accelerator.backward(forgotten(model(torch.randn(4, 64))).mean())
    prepared.step()
    assert type(optimizer) is torch.optim.AdamW
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (
        "AdamW keeps its own states: some of its weights belong to no prepared model"
        in messages()[0]
    )


@pytest.mark.parametrize("training_follows", [False, True])
def test_evaluation_models_keep_their_dtype_unless_an_optimizer_trains_them(
    accelerator_with, training_follows
):
    accelerator = accelerator_with()
    model = accelerator.prepare_model(Net(), evaluation_mode=True)
    if training_follows:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert isinstance(model.up.weight, SplitWeight) == training_follows
    assert type(model.up) is Float8Linear


def test_another_optimizer_keeps_its_states_and_is_named_once(accelerator_with, messages):
    accelerator = accelerator_with()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, prepared = accelerator.prepare(model, optimizer)
    _train(accelerator, model, prepared, 2)
    assert isinstance(model.up.weight, SplitWeight)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(message.count("SGD keeps its own states") for message in messages()) == 1
    assert "weights in two halves" in messages()[0]


def test_optimizer_prepared_after_its_model_is_reported_then(accelerator_with, messages):
    accelerator = accelerator_with()
    model = accelerator.prepare(Net())
    accelerator.prepare(torch.optim.AdamW(model.parameters()))
    accelerator.prepare(model)
    summary, later = messages()
    assert "linear layers" in summary
    assert "FP8: optimizer AdamW with 8-bit states\n  memory " in later


def test_placeholder_of_deepspeed_is_handed_through(accelerator_with):
    from accelerate.utils.deepspeed import DummyOptim

    model = Net()
    placeholder = DummyOptim(model.parameters())
    assert accelerator_with().prepare(model, placeholder)[1] is placeholder
    assert model.up.weight.dtype == torch.float32


def test_model_unwrapped_from_autocast_has_its_dtype_again(accelerator_with):
    accelerator = accelerator_with()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, prepared = accelerator.prepare(model, optimizer)
    _train(accelerator, model, prepared, 2)
    assert isinstance(accelerator.unwrap_model(model).up.weight, SplitWeight)

    def leave():
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)

    check_peak_of_leaving(model, leave, model.up.weight.nbytes)
    unwrapped = accelerator.unwrap_model(model)
    assert {type(p) for p in unwrapped.parameters()} == {torch.nn.Parameter}
    assert {p.dtype for p in unwrapped.parameters()} == {torch.float32}
    assert type(unwrapped.up) is torch.nn.Linear
    assert unwrapped(torch.randn(4, 64)).isfinite().all()
    rounded = unwrapped.up.weight.bfloat16().float()
    assert not torch.equal(rounded, unwrapped.up.weight)  # the residual is in the weight again


def test_compiled_model_prepared_before_its_optimizer(accelerate):
    accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=True, dynamo_backend="eager")
    model = accelerator.prepare(Net())
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    _train(accelerator, model, optimizer, 1)
    assert isinstance(optimizer.optimizer, Float8Optimizer)
