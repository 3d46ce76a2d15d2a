import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.batched_muon import SingleDeviceMuon
from tests.internals import BUFFER, GROUP, Int8Momentum, MuonOptimizer, is_released, thresholds
from tests.internals import decode_linear_int8 as decode
from tests.internals import encode_linear_int8 as encode
from tests.steps import train_steps
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, memory_report

CLASSES = [torch.optim.Muon, SingleDeviceMuon]
each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__module__[:5])


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3)))


def _made(cls, config=None, **options):
    model, config = _model(), config or FP8Config()
    optimizer = cls(model.parameters(), lr=0.02, weight_decay=0.01)
    convert_to_float8(model, config)
    report = convert_optimizer(optimizer, config, model=model)
    return model, optimizer, report


def _loss(model, step):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step % 4))
    with torch.autocast("cpu", torch.bfloat16):
        return (model(x).float() - x.roll(1, 1)).square().mean()


def _train(model, optimizer, steps, first=0):
    return train_steps(model, optimizer, steps, first, _loss)


def _weights(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("shape", [(8, 64), (3, 65), (16, 200), (1, 1)], ids=str)
@pytest.mark.parametrize("kind", ["normal", "zeros", "outlier", "tiny"])
def test_what_was_read_is_stored_as_it_is(shape, kind):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if kind == "zeros":
        x.zero_()
    if kind == "outlier":
        x[0, 0] = 1e6
    if kind == "tiny":
        x *= 1e-30
    stored = encode(x)
    again = encode(decode(stored))
    assert torch.equal(decode(stored), decode(again))
    # A scale is within 2^-9 of the largest magnitude over 127, and half of it is the error.
    largest = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    bound = largest.abs().amax(-1).repeat_interleave(GROUP, 1)[:, : x.shape[1]] / 127
    assert ((decode(stored) - x).abs() <= 0.51 * bound + 1e-38).all()
    index = torch.arange(x.numel(), dtype=torch.int32).view(shape)
    rounded = encode(x, thresholds(index, 0, 3, 1))
    assert torch.equal(decode(encode(decode(rounded))), decode(rounded))


def test_what_is_not_finite_stays_visible():
    x = torch.ones(2, 128)
    x[0, 3], x[1, 70] = float("inf"), float("nan")
    value = decode(encode(x))
    assert value[0, :64].isnan().all()
    assert value[1, 64:].isnan().all()
    torch.testing.assert_close(value[0, 64:], torch.ones(64), rtol=2e-3, atol=0)


def test_the_thresholds_of_two_elements_differ_otherwise_after_4096_steps():
    """Errors of elements that always round together would be those of whole rows."""
    index = torch.arange(512, dtype=torch.int32)
    first, within, later = (thresholds(index, 0, step, 0).diff() % 1 for step in (7, 4000, 4103))
    assert torch.allclose(first, within, atol=1e-6)
    assert float((first - later).abs().mean()) > 0.2  # of independent ones a third


def test_thresholds_are_spread_evenly_over_steps():
    """Over 32 steps the error of the mean is 0.02 of a code; random bits would leave 0.07."""
    x = torch.rand(16, 64, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 1.0  # the largest of its group
    index = torch.arange(x.numel(), dtype=torch.int32).view(x.shape)
    values = [decode(encode(x, thresholds(index, 0, step, 0))) for step in range(32)]
    error = (torch.stack(values).mean(0) - x)[:, 1:] * 127
    assert error.square().mean().sqrt() < 0.045
    assert len({tuple(v.flatten().tolist()) for v in values}) == 32


@each_class
def test_a_layer_takes_6_bytes(cls):
    model, optimizer, report = _made(cls)
    assert type(optimizer).__name__ == cls.__name__
    assert str(report) == f"{cls.__name__} with an int8 momentum, 3 weights in two halves"
    assert report.num_split == 3
    _train(model, optimizer, 1)
    _loss(model, 1).backward()
    counted = memory_report(model, optimizer)
    # weight 2, residual 1, gradient 2, momentum 1, and a scale of 2 bytes for 64 elements
    assert counted.bytes_per_param == 6 + 2 / 64
    momenta = [state[BUFFER] for state in optimizer.state.values()]
    assert all(isinstance(m, Int8Momentum) and m.dtype == torch.float32 for m in momenta)


@each_class
def test_gradient_release_takes_4_bytes_and_changes_nothing(cls):
    results = []
    for release in (False, True):
        model, optimizer, _ = _made(cls, FP8Config(gradient_release=release))
        losses = _train(model, optimizer, 4)
        results.append((losses, _weights(model)))
        _loss(model, 4).backward()
        if release:
            assert memory_report(model, optimizer).bytes_per_param == 4 + 2 / 64
            assert all(map(is_released, model.parameters()))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


@each_class
def test_a_stock_optimizer_opens_the_state(cls):
    model, optimizer, _ = _made(cls)
    _train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    momentum = saved["state"][0][BUFFER]
    assert (type(momentum), momentum.dtype) == (torch.Tensor, torch.float32)
    stock = cls(_model().parameters())
    stock.load_state_dict({k: v for k, v in saved.items() if k != "torch_fp8"})
    assert torch.equal(stock.state_dict()["state"][0][BUFFER], momentum)
    _, resumed, _ = _made(cls)
    resumed.load_state_dict(saved)
    assert all(isinstance(state[BUFFER], Int8Momentum) for state in resumed.state.values())


def test_a_momentum_from_before_the_conversion_is_taken_over():
    model = _model()
    optimizer = torch.optim.Muon(model.parameters())
    _train(model, optimizer, 2)
    parameter = next(iter(model.parameters()))
    before = optimizer.state[parameter][BUFFER].clone()
    convert_to_float8(model, FP8Config())
    convert_optimizer(optimizer, FP8Config(), model=model)
    momentum = optimizer.state[parameter][BUFFER]
    assert isinstance(momentum, Int8Momentum)
    assert (momentum - before).abs().max() <= before.abs().max() / 250
    momentum.zero_()
    assert not optimizer.state[parameter][BUFFER].any()
    twin = copy.deepcopy(optimizer)
    assert isinstance(twin, MuonOptimizer)


def test_the_update_comes_from_a_momentum_that_is_not_rounded_yet():
    """One step: the momentum is the gradient's, so that weights are a stock one's, but for
    theirs.
    """
    stock, twin = _model(), _model()
    optimizers = [torch.optim.Muon(m.parameters(), lr=0.02) for m in (stock, twin)]
    convert_to_float8(twin, FP8Config(opt_level="O1"))
    convert_to_float8(stock, FP8Config(opt_level="O1"))
    convert_optimizer(optimizers[1], FP8Config(), model=twin)
    for model, optimizer in zip((stock, twin), optimizers, strict=True):
        for p in model.parameters():
            p.grad = torch.ones_like(p).cumsum(0).sin() + torch.ones_like(p).cumsum(1).cos()
        optimizer.step()
    for p, q in zip(stock.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=1e-5)


def test_other_states_beside_muon_stay():
    """A class may step some weights by Adam, as those for embeddings do."""

    class SingleDeviceMuonWithAuxAdam(SingleDeviceMuon):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"][:1]:
                self.state[p].setdefault("exp_avg", torch.zeros_like(p)).add_(p.grad)
                self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))

    model, optimizer, report = _made(SingleDeviceMuonWithAuxAdam)
    assert report.reason is None
    _train(model, optimizer, 1)
    state = optimizer.state[next(iter(model.parameters()))]
    assert type(state["exp_avg"]) is torch.Tensor
    assert isinstance(state[BUFFER], Int8Momentum)


def test_a_muon_that_waits_for_other_ranks_releases_nothing():
    class Muon(SingleDeviceMuon):
        pass

    _, optimizer, report = _made(Muon, FP8Config(gradient_release=True))
    assert not optimizer.fp8_config.gradient_release
    assert str(report).endswith("; gradient_release is for Adam and AdamW")


def test_a_class_of_that_name_without_a_momentum_keeps_its_states():
    class MuonLike(torch.optim.Adagrad):
        pass

    _, _, report = _made(MuonLike)
    assert "keeps its own states" in str(report)


@pytest.mark.parametrize(
    ("options", "size"), [({"opt_level": "O3"}, 5.063), ({"split_weights": False}, 12.0)], ids=str
)
def test_bytes_with_other_options(options, size):
    model, optimizer, report = _made(torch.optim.Muon, FP8Config(**options))
    losses = _train(model, optimizer, 4)
    assert losses[-1] < losses[0]
    _loss(model, 4).backward()
    assert memory_report(model, optimizer).bytes_per_param == pytest.approx(size, abs=1e-3)
    if "split_weights" in options:
        assert str(report) == ("Muon keeps its own states: its int8 momentum needs split weights")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"momentum": 0.5},
        {"weight_decay": 0.5},
        {"ns_steps": 2},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"ns_coefficients": (3.0, -3.5, 1.5)},
    ],
    ids=str,
)
def test_shards_have_the_updates_of_stock(single_process_group, options):
    """Each option changes an update by more than the 8 bits of the gathered codes do."""
    weight = torch.randn(96, 64)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    stock = nn.Parameter(weight.clone())
    sharded = nn.Parameter(DTensor.from_local(weight.clone(), mesh, [Shard(0)]))
    optimizers = [torch.optim.Muon([p], lr=0.1, **options) for p in (stock, sharded)]
    convert_optimizer(optimizers[1], FP8Config())
    for _ in range(3):
        gradient = torch.randn(96, 64)
        stock.grad = gradient.clone()
        sharded.grad = DTensor.from_local(gradient.clone(), mesh, [Shard(0)])
        before = stock.detach().clone(), sharded.to_local().detach().clone()
        for optimizer in optimizers:
            optimizer.step()
        wanted = stock.detach() - before[0]
        error = sharded.to_local().detach() - before[1] - wanted
        assert error.norm() < 0.03 * wanted.norm()
