"""Random bits of every place that rounds stochastically: of parameters, steps, ranks and shards.

Each place stores the same value in every step. Bits that repeat would leave the same error each
time, and so a bias; bits that two shards share would correlate their errors.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.internals import local, slot_of
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import split_sharded

pytestmark = pytest.mark.filterwarnings("ignore:FP8. .*the layer was never called")

ROWS, COLS, STEPS, RATE = 64, 128, 16, 1e-5


class Place:
    """A model with two equal weights whose optimizer rounds something in each step.

    Args:
        level: opt_level.
        optimizer: function from parameters to an optimizer.
        shard: index and number of the shards of whose rows this is one; None: whole weights.
    """

    def __init__(self, level, optimizer, shard=None):
        self.shard = shard
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(ROWS, COLS, generator=generator)
        if shard is not None:
            # A name of its own, because torch caches meshes by shape and name.
            names = (f"rank{shard[0]}",)
            self.mesh = init_device_mesh("cpu", (shard[1],), mesh_dim_names=names)
        # 16 bits below the sign and exponent of float32 are zero: stored exactly in 16 or 24 bits.
        self.weight = self.rows(weight.bfloat16().float())
        self.value = self.rows(torch.randn(ROWS, COLS, generator=generator))
        self.model = nn.Sequential(*(nn.Linear(COLS, ROWS, bias=False) for _ in range(2)))
        for layer in self.model:
            layer.weight = nn.Parameter(weight.bfloat16().float())
            if shard is not None:
                fully_shard(layer, mesh=self.mesh)
        config = FP8Config(opt_level=level, recipe="tensorwise")
        convert_to_float8(self.model, config)
        self.optimizer = optimizer(self.model.parameters())
        if shard is None:
            convert_optimizer(self.optimizer, config, model=self.model)
        else:
            split_sharded(self.model, [self.optimizer], config)

    def rows(self, x):
        return x if self.shard is None else x.chunk(self.shard[1])[self.shard[0]]

    def wrapped(self, x):
        if self.shard is None:
            return x
        options = {"shape": torch.Size((ROWS, COLS)), "stride": (COLS, 1)}
        return DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False, **options)

    @torch.no_grad()
    def step(self, write):
        for parameter in self.model.parameters():
            local(parameter).copy_(write)
            parameter.grad = self.wrapped(self.value.clone())
        self.optimizer.step()
        return [local(p).detach().clone() for p in self.model.parameters()]


def _adamw(**options):
    return lambda parameters: torch.optim.AdamW(parameters, weight_decay=0, **options)


def written_weight(shard):
    place = Place("O2", _adamw(lr=0.0), shard)
    while True:
        yield [weight - place.value for weight in place.step(place.value)]


def stepped_weight(shard):
    place = Place("O2", _adamw(lr=RATE, betas=(0.0, 0.0), eps=0.0), shard)
    target = place.weight.double() - RATE * place.value.sign()
    while True:
        yield [(weight - target).float() for weight in place.step(place.weight)]


def weight_of_a_foreign_step(shard):
    place = Place("O2", lambda parameters: torch.optim.SGD(parameters, lr=RATE), shard)
    target = place.weight.double() - RATE * place.value.double()
    while True:
        yield [(weight - target).float() for weight in place.step(place.weight)]


def _moment(name, target):
    def moment(shard):
        place = Place("O2", _adamw(lr=0.0, betas=(0.0, 0.0)), shard)
        while True:
            place.step(place.weight)
            states = [local(state[name]) for state in place.optimizer.state.values()]
            yield [state.dequantize() - target(place.value) for state in states]

    moment.__name__ = name
    return moment


def momentum(shard):
    place = Place(
        "O2", lambda p: torch.optim.Muon(p, lr=1e-30, momentum=0.0, weight_decay=0), shard
    )
    while True:
        place.step(place.weight)
        states = [local(state["momentum_buffer"]) for state in place.optimizer.state.values()]
        yield [state.dequantize() - place.value for state in states]


def gradient(shard):
    yield from _gradient(shard, 1)


def sum_of_gradients(shard):
    yield from _gradient(shard, 2)


def _gradient(shard, micro_batches):
    place = Place("O3", _adamw(lr=0.0), shard)
    parameters = list(place.model.parameters())
    while True:
        errors = []
        for parameter in parameters:
            parameter.grad = place.wrapped(place.value.clone())
            slot_of(parameter)(parameter)
            for _ in range(micro_batches - 1):
                local(parameter.grad).add_(place.value)
            stored = local(parameter.grad).dequantize(torch.float32)
            errors.append(stored - micro_batches * place.value)
        yield errors
        place.optimizer.step()
        place.optimizer.zero_grad()


PLACES = (
    written_weight,
    stepped_weight,
    weight_of_a_foreign_step,
    _moment("exp_avg", lambda grad: grad),
    _moment("exp_avg_sq", torch.square),
    momentum,
    gradient,
    sum_of_gradients,
)
each_place = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


def _correlation(a, b):
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()


@each_place
def test_errors_of_parameters_and_steps_average_out(place):
    errors = place(None)
    rounds = [next(errors) for _ in range(STEPS)]
    first, second = (torch.stack(of_weight) for of_weight in zip(*rounds, strict=True))
    assert first.square().mean() > 0
    assert abs(_correlation(first, second)) < 0.05
    # The mean of independent errors is 1 / sqrt(16) of one of them.
    assert first.mean(0).square().mean() < first.square().mean() * 0.4**2


@pytest.fixture
def two_ranks():
    """Start a process group in which this is one rank of two; its collectives move nothing."""

    def start(rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=2)

    yield start
    dist.destroy_process_group()


@each_place
def test_shards_have_the_bits_of_the_whole(place, two_ranks):
    shards = []
    for rank in range(2):
        two_ranks(rank)
        errors = place((rank, 2))
        shards.append([next(errors) for _ in range(2)])
    errors = place(None)
    for step in range(2):
        for index, whole in enumerate(next(errors)):
            parts = torch.cat([shard[step][index] for shard in shards])
            torch.testing.assert_close(parts, whole, rtol=0, atol=0)
