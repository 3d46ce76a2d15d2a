import copy
import pickle

import pytest
import torch
from torch import nn

from tests.internals import Float8Optimizer, SplitWeight, residual_of, set_residual
from tests.steps import through_a_file, train_steps
from torch_fp8 import FP8Config, convert_optimizer, merged_state_dict

# Weights of the user's in BF16 keep their residuals in the optimizer.
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def _model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(100, 96), nn.Linear(96, 128), nn.LayerNorm(128), nn.Linear(128, 70)
    ).to(dtype)


def _converted(config=None, cls=torch.optim.AdamW, dtype=torch.float32, **options):
    model = _model(dtype)
    optimizer = cls(model.parameters(), **{"lr": 1e-3, "weight_decay": 0.1, **options})
    convert_optimizer(optimizer, config or FP8Config(), model=model)
    return model, optimizer


def _equal(model, other):
    return all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_trains_as_the_stock_optimizer(cls):
    stock = _model()
    reference = train_steps(stock, cls(stock.parameters(), lr=1e-3, weight_decay=0.1), 40)
    losses = train_steps(*_converted(cls=cls), 40)
    assert losses[-1] < 0.3 * losses[0]
    assert losses[-1] == pytest.approx(reference[-1], rel=0.01)


@each_dtype
@pytest.mark.parametrize("written", [False, True])
def test_a_stopped_run_goes_on_bit_for_bit(dtype, written):
    model, optimizer = _converted(dtype=dtype)
    train_steps(model, optimizer, 5)
    if written:  # after the last step: a float32 weight has all its bits
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.999)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = through_a_file(state, weights_only=True)
    train_steps(model, optimizer, 5, first=5)
    assert {(type(w), w.dtype) for w in saved["model"].values()} == {(torch.Tensor, dtype)}
    resumed, other = _converted(FP8Config(seed=7), dtype=dtype)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train_steps(resumed, other, 5, first=5)
    assert _equal(model, resumed)
    expected, merged = merged_state_dict(model, optimizer), merged_state_dict(resumed, other)
    assert all(torch.equal(expected[name], merged[name]) for name in expected)


def test_a_checkpoint_before_the_first_step_may_have_residuals():
    model, optimizer = _converted(dtype=torch.bfloat16)
    residual = torch.randint(-127, 128, (100, 96), dtype=torch.int8)
    set_residual(model[0].weight, residual)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert torch.equal(saved[1]["torch_fp8_residuals"][0], residual)
    expected = merged_state_dict(model, optimizer)
    resumed, other = _converted(dtype=torch.bfloat16)
    train_steps(resumed, other, 2)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    merged = merged_state_dict(resumed, other)
    assert all(torch.equal(expected[name], merged[name]) for name in expected)
    torch.optim.AdamW(_model().parameters()).load_state_dict(saved[1])
    saved[1]["torch_fp8_residuals"][0] = torch.zeros(3, 3, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"state\[0\]\['residual'\] has shape \(3, 3\)"):
        other.load_state_dict(saved[1])


def test_a_residual_that_stock_adamw_carried_along_is_not_taken():
    model, optimizer = _converted(dtype=torch.bfloat16)
    train_steps(model, optimizer, 2)
    saved = optimizer.state_dict()
    assert saved["state"][1]["residual"].any()
    stock = _model()
    stock.load_state_dict(merged_state_dict(model, optimizer))
    plain = torch.optim.AdamW(stock.parameters(), lr=1e-3)
    plain.load_state_dict(saved)
    train_steps(stock, plain, 2)
    back = _model()
    back.load_state_dict(stock.state_dict())
    again = torch.optim.AdamW(back.parameters(), lr=1e-3)
    convert_optimizer(again, model=back)
    again.load_state_dict(plain.state_dict())
    for _ in range(2):
        for name, value in merged_state_dict(back, again).items():
            torch.testing.assert_close(value, stock.state_dict()[name], rtol=2**-16, atol=0)
        again.param_groups[0]["lr"] = 0.0
        for parameter in back.parameters():
            parameter.grad = torch.zeros_like(parameter)
        again.step()


def test_stock_adamw_opens_the_checkpoint_and_ours_a_stock_one():
    model, optimizer = _converted()
    train_steps(model, optimizer, 5)
    stock = _model()
    stock.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(stock.parameters(), lr=1e-3, weight_decay=0.1)
    plain.load_state_dict(optimizer.state_dict())
    expected = train_steps(stock, plain, 5, first=5)
    assert train_steps(model, optimizer, 5, first=5) == pytest.approx(expected, rel=0.01)

    back, other = _converted()
    back.load_state_dict(stock.state_dict())
    other.load_state_dict(plain.state_dict())
    expected = train_steps(stock, plain, 5, first=10)
    assert train_steps(back, other, 5, first=10) == pytest.approx(expected, rel=0.01)


class _Named(torch.optim.AdamW):
    """A user's class."""


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam, _Named])
def test_the_class_keeps_its_name_and_says_where_it_is_from(cls):
    _, optimizer = _converted(cls=cls)
    ours = type(optimizer)
    assert (ours.__name__, ours.__qualname__) == (cls.__name__, cls.__qualname__)
    assert (ours.__module__, ours.__doc__) == (cls.__module__, cls.__doc__)
    assert repr(optimizer).startswith(f"{cls.__name__} (")
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is ours
        assert isinstance(other, Float8Optimizer)


def test_small_bf16_parameters_keep_float32_precision():
    model, optimizer = _converted(dtype=torch.bfloat16, lr=1e-6)
    norm = model[2].weight
    start = norm.detach().float().clone()
    train_steps(model, optimizer, 50)
    state = optimizer.state[norm]
    assert residual_of(norm).dtype == torch.int16
    assert state["exp_avg"].dtype == torch.float32
    moved = merged_state_dict(model, optimizer)["2.weight"] - start
    assert 2e-5 < moved.abs().mean() < 6e-5  # 50 steps of 1e-6, which BF16 at 1.0 cannot show


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_small_parameters_are_stepped_as_the_stock_optimizer_does(cls):
    options = {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "maximize": True}
    twin, (model, optimizer) = _model(), _converted(cls=cls, **options)
    stock = cls(twin.parameters(), lr=1e-3, **options)
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    for step in range(3):
        for ours, theirs in pairs:
            ours.grad, theirs.grad = (torch.full_like(theirs, 0.1 + step) for _ in range(2))
        optimizer.step()
        stock.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs if ours.ndim == 1)


@each_dtype
def test_writes_from_outside_stay(dtype):
    model, optimizer = _converted(dtype=dtype)
    train_steps(model, optimizer, 2)
    weight = model[1].weight
    with torch.no_grad():
        weight.data = torch.full_like(weight, 0.5)
    off = (merged_state_dict(model, optimizer)["1.weight"] - 0.5).abs().max()
    assert off <= (0 if dtype == torch.float32 else 0.5 * 2**-8)
    train_steps(model, optimizer, 1, first=2)
    assert (weight - 0.5).abs().max() < 0.01
    weight.data = torch.full((128, 96), 0.25)  # float32: the user's dtype from now on
    assert torch.equal(weight, torch.full((128, 96), 0.25))
    train_steps(model, optimizer, 1, first=3)
    assert weight.dtype == torch.float32
    assert isinstance(weight, SplitWeight) == (dtype == torch.float32)
    assert "residual" not in optimizer.state[weight]
    moved = (weight - 0.25).abs()
    assert moved.max() < 0.01
    # With 8 residual bits an update of less than 2^-17 may round to none.
    assert (moved > (2.0**-17 if dtype == torch.float32 else 0)).float().mean() > 0.98


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_a_weight_that_is_given_data_of_another_dtype_has_that_dtype(dtype):
    model, optimizer = _converted()
    train_steps(model, optimizer, 2)
    weight = model[1].weight
    weight.data = torch.full((128, 96), 0.5, dtype=dtype)
    assert (type(weight), weight.dtype) == (nn.Parameter, dtype)
    assert model[1].weight is weight
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.dtype == dtype
    assert ((weight - 0.5).abs() < 0.01).all()
    assert (merged_state_dict(model, optimizer)["1.weight"] < 0.5).all()
