import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.internals import DEFAULT_BOUNDS, LossSpikes, Series, crossings, series_module
from tests.steps import monitored
from tests.torch_fp8.block_models import MLP
from tests.torch_fp8.monitor.test_expert_observer import Watched as WatchedExperts
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8


class Watched:
    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), MLP(64, 128), nn.Linear(64, 64))
        if "recipe" not in options:
            options = {"recipe": "delayed", "amax_history_len": 4, **options}
        config = FP8Config(**{"monitor": 1, **options})
        convert_to_float8(self.model, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if config.opt_level != "O1":
            convert_optimizer(self.optimizer, config, model=self.model)
        self.logged, self.said, self.in_x, self.out_scale = {}, [], lambda x: x, 1.0
        parts = self.model, self.optimizer, config, self.logged
        self.monitor = monitored(*parts, say=self.said.append)

    def step(self, factor=1.0):
        x = torch.randn(32, 64)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.model(self.in_x(x)) * self.out_scale
        loss = (y.float() - x).square().mean() * factor
        loss.backward()
        self.monitor.observe_loss(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def crossed(self):
        return {c.name for c in crossings(self.logged[self.monitor.step])}


def _larger_input(watched):
    watched.in_x = lambda x: x * 3000


def _outlier_channel(watched):
    watched.in_x = lambda x: x * torch.where(torch.arange(64) == 5, 1e6, 1.0)


def _infinite_input(watched):
    watched.in_x = lambda x: torch.where(torch.arange(64) == 5, math.inf, x)


def _dead_gradient(watched):
    watched.out_scale = 0.0


def _larger_gradient(watched):
    watched.out_scale = 1e5


@torch.no_grad()
def _one_large_weight(watched):
    watched.model[2].weight[0, 0] = 3e5


@torch.no_grad()
def _parallel_weights(watched):
    mlp = watched.model[1]
    mlp.up_proj.weight[7] = -2 * mlp.gate_proj.weight[7]


def _flushed_v(watched):
    state = watched.optimizer.state[watched.model[1].down_proj.weight]
    state["exp_avg_sq"].qdata.zero_()


def _lagging_v(watched):
    state = watched.optimizer.state[watched.model[1].down_proj.weight]
    state["exp_avg_sq"].scale.sub_(40)  # a scale is an exponent
    state["step"].fill_(1000)


@pytest.mark.parametrize(
    ("plant", "names"),
    [
        (_larger_input, ["0/input/saturation", "0/input/sqnr"]),
        (_outlier_channel, ["0/input/outliers"]),
        (_infinite_input, ["0/input/amax"]),
        (_dead_gradient, ["2/grad_output/amax"]),
        (_larger_gradient, ["2/grad_output/saturation", "2/grad_output/direction_error"]),
        (_one_large_weight, ["2/weight/underflow"]),
        (_parallel_weights, ["1/swiglu/alignment"]),
        (_flushed_v, ["1.down_proj/update/flushed"]),
        (_lagging_v, ["1.down_proj/update/rms"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.filterwarnings("ignore:FP8 monitor, step")
def test_a_planted_fault_is_found_by_name(plant, names):
    watched = Watched()
    for _ in range(3):
        watched.step()
        assert watched.crossed() == set()
    plant(watched)
    watched.step()
    assert {f"fp8/{name}" for name in names} <= watched.crossed()
    assert watched.logged[4]["fp8/alarm"] >= len(watched.crossed()) >= 1


def test_every_statistic_with_a_bound_is_measured():
    watched = Watched()
    watched.step()
    watched.step()
    experts = WatchedExperts("plain")
    graphs = Watched(recipe="tensorwise", graph_scales="last_step")
    graphs.step()
    graphs.step()
    names = {*watched.logged[2], *graphs.logged[2], *experts.step()}
    measured = {tuple(name.rsplit("/", 2)[1:]) for name in names}
    assert {(bound.kind, bound.statistic) for bound in DEFAULT_BOUNDS} <= measured


def test_a_warning_names_a_bound_once_and_counts_all():
    watched = Watched(recipe="tensorwise")
    watched.step()
    _outlier_channel(watched)

    def train():
        for _ in range(3):
            watched.step()

    with pytest.warns(RuntimeWarning, match=r"step 2: .* new: fp8/0/input/\w+ = ") as caught:
        train()
    alarms = [w for w in caught if "bound(s) crossed" in str(w.message)]
    assert sum("fp8/0/input/outliers" in str(w.message) for w in alarms) == 1
    assert all(watched.logged[step]["fp8/alarm"] >= 1 for step in (2, 3, 4))


def test_losses_that_jump_are_spikes_and_a_new_level_is_none():
    spikes = LossSpikes()
    falling = [3 + 2 * math.exp(-i / 50) + 0.05 * torch.randn(()).item() for i in range(300)]
    assert not any(map(spikes.count, falling))
    assert spikes.count(4.0)
    assert spikes.count(math.nan)
    assert not spikes.count(3.05)
    assert [spikes.count(6.0 + 0.01 * i) > 0 for i in range(20)] == [True] * 15 + [False] * 5


def test_a_loss_spike_without_an_action_is_told_when_it_is_fetched():
    watched = Watched(monitor=10)
    for step in range(1, 31):
        if step == 30:
            with pytest.warns(RuntimeWarning, match="the loss of step 25 is .* far above"):
                watched.step()
        else:
            watched.step(50 if step == 25 else 1)
    assert [e["event"] for e in watched.monitor.events] == ["loss_spike"]


def test_spikes_do_not_become_the_level_that_judges_the_next_one():
    spikes = LossSpikes()
    assert not any(spikes.count(1.0 + 0.01 * (i % 3)) for i in range(16))
    for _ in range(6):
        assert all(spikes.count(50.0) for _ in range(LossSpikes.MOST - 1))
        assert not spikes.count(1.0)
    assert max(spikes.losses) < 2


def test_ranks_join_the_worst_of_each_statistic(monkeypatch):
    """The other rank's numbers come from a run of its own, reduced as torch.distributed does it."""
    series = Series({"layer/input": ("sqnr", "saturation", "underflow")})
    good, bad = torch.tensor([31.0, 0.0, 0.1]), torch.tensor([4.0, 0.5, 0.3])
    sent = {}

    def all_reduce(tensor, op=dist.ReduceOp.SUM):
        sent.setdefault(rank, []).append((tensor.clone(), op))
        if rank == "second":
            other, same_op = sent["first"].pop(0)
            assert same_op == op
            tensor.copy_(tensor + other if op == dist.ReduceOp.SUM else tensor.maximum(other))

    monkeypatch.setattr(series_module, "in_several_ranks", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    for first, second in ((good, bad), (bad, good)):
        rank = "first"
        series.joined(first)
        rank = "second"
        assert series.joined(second) == pytest.approx([4.0, 0.5, 0.2])
