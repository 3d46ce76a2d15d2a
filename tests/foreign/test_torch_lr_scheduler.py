"""Every learning-rate scheduler of torch on converted optimizers, against stock ones.

In each order: the scheduler is made before the optimizer is converted, after it, or has stepped by
then; and with a checkpoint of both in the middle. The rates, and the betas that some of them move,
are stock's; so are the warnings about the order of steps.
"""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from tests.internals import Float8Optimizer
from torch_fp8 import convert_optimizer

STEPS = 12
SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda e: 0.9**e),
    "LambdaLR of groups": lambda o: schedulers.LambdaLR(
        o, [lambda e: 0.9**e, lambda e: 1 / (1 + e)]
    ),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda e: 0.95),
    "StepLR": lambda o: schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5], 0.1),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.2, total_iters=6),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, 3, cycle_momentum=True),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=STEPS + 2),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-4, 4),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.8)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 3), schedulers.ExponentialLR(o, 0.9)]
    ),
}
QUICK = ("LambdaLR", "OneCycleLR", "SequentialLR")


def test_every_scheduler_of_torch_is_here():
    known = {name for name in vars(schedulers) if name.endswith(("LR", "Restarts", "Scheduler"))}
    known |= {"ReduceLROnPlateau"}
    base = {"LRScheduler", "_LRScheduler"}
    assert known - base <= {name.split()[0] for name in SCHEDULERS}


def _made(cls, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 5e-3}]
    options = copy.deepcopy(options)
    if isinstance(options.get("lr"), torch.Tensor):
        groups[1]["lr"] = torch.tensor(5e-3)
    return model, cls(groups, **{"lr": 1e-2, **options})


def _step(model, optimizer, scheduler, step):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
    scheduler.step(1.0) if plateau else scheduler.step()


def _rates(optimizer):
    return [(float(g["lr"]), *map(float, g["betas"])) for g in optimizer.param_groups]


def _run(name, cls, options, order):
    """The rates after each step, and the warnings; the scheduler is made by `order`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = _made(cls, options)
        if order == "after":
            convert_optimizer(optimizer, model=model)
        scheduler = SCHEDULERS[name](optimizer)
        rates = [_rates(optimizer)]
        if order == "before":
            convert_optimizer(optimizer, model=model)
        for step in range(STEPS):
            if order == "stepped" and step == 3:
                convert_optimizer(optimizer, model=model)
            if order == "loaded" and step == 5:
                saved = copy.deepcopy(
                    (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
                )
                model, optimizer = _made(cls, options)
                scheduler = SCHEDULERS[name](optimizer)
                convert_optimizer(optimizer, model=model)
                for target, state in zip((model, optimizer, scheduler), saved, strict=True):
                    target.load_state_dict(state)
            _step(model, optimizer, scheduler, step)
            rates.append(_rates(optimizer))
    assert isinstance(optimizer, Float8Optimizer) == (order != "stock")
    assert optimizer.state[model[0].weight]["step"] == STEPS
    messages = {str(w.message) for w in caught if "lr_scheduler" in str(w.message)}
    return rates, messages


def _cases():
    for name in SCHEDULERS:
        for order in ("before", "after", "stepped", "loaded"):
            for options in ({}, {"lr": torch.tensor(1e-2)}):
                quick = name in QUICK and not options
                yield pytest.param(
                    name,
                    order,
                    options,
                    id=f"{name}-{order}-{'tensor' if options else 'float'}",
                    marks=() if quick else pytest.mark.slow,
                )


@pytest.mark.parametrize(("name", "order", "options"), list(_cases()))
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_rates_are_stocks(name, order, options, cls):
    expected, stock_messages = _run(name, cls, options, "stock")
    rates, messages = _run(name, cls, options, order)
    for mine, stocks in zip(rates, expected, strict=True):
        for group, stock_group in zip(mine, stocks, strict=True):
            assert group == pytest.approx(stock_group, rel=1e-5)
    assert messages == stock_messages


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
                                  for n in SCHEDULERS])  # fmt: skip
def test_a_copy_of_optimizer_and_scheduler_goes_on_together(name):
    model, optimizer = _made(torch.optim.AdamW, {})
    if name.startswith("LambdaLR") or name == "MultiplicativeLR":
        pytest.skip("stock schedulers of functions are not deep-copied with their optimizers")
    scheduler = SCHEDULERS[name](optimizer)
    convert_optimizer(optimizer, model=model)
    for step in range(3):
        _step(model, optimizer, scheduler, step)
    twins = copy.deepcopy((model, optimizer, scheduler))
    for step in range(3, 6):
        _step(model, optimizer, scheduler, step)
        _step(*twins, step)
    assert _rates(optimizer) == _rates(twins[1])
    assert all(map(torch.equal, model.parameters(), twins[0].parameters()))
