import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.internals import TOKENS, WORST, decibel, read_run
from tests.internals import grouped_linear_function as grouped
from tests.moe_experts import LAYOUTS, E, H, K, experts
from tests.steps import monitored
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.ops.quantize import dequantize, quantize

TOKENS_A_STEP = 160


class Block(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.experts = experts(layout)
        self.choice = torch.arange(TOKENS_A_STEP)[:, None] % E + torch.arange(K)  # (T, K)

    def forward(self, x):
        index, scores = self.choice % E, torch.full((len(x), K), 1 / K)
        if hasattr(self.experts, "is_transposed") and hasattr(self.experts, "has_gate"):
            if type(self.experts).__name__.endswith("Llama4TextExperts"):
                return self._batched(x, index)
            return self.experts(x, index, scores.to(x.dtype))
        return self._batched(x, index)

    def _batched(self, x, index):
        chosen = torch.zeros(len(x), E).scatter(1, index, 1.0).t()[..., None]  # (E, T, 1)
        y = self.experts((x[None] * chosen).reshape(-1, H))
        return y.view(E, len(x), H).sum(0)


class Watched:
    def __init__(self, layout, tmp_path=None, monitor=1, **options):
        torch.manual_seed(0)
        self.block = Block(layout)
        config = FP8Config(recipe="rowwise", opt_level="O1", monitor=monitor, **options)
        convert_to_float8(self.block, config)
        self.optimizer = torch.optim.AdamW(self.block.parameters(), lr=1e-4)
        self.logged, self.said, self.x = {}, [], torch.randn(TOKENS_A_STEP, H)
        watched = self.block, self.optimizer, config, self.logged
        self.monitor = monitored(*watched, folder=tmp_path, say=self.said.append)

    def step(self, forward=None):
        with torch.autocast("cpu", torch.bfloat16):
            y = (forward or self.block)(self.x)
        y.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.logged.get(self.monitor.step)


def _names(block):
    return block.experts.fp8_weight_names


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_all_numbers_and_is_healthy(layout):
    watched = Watched(layout)
    watched.step()
    series = watched.step()
    expected = {f"fp8/experts/experts/{name}" for name in TOKENS}
    for weight in _names(watched.block):
        kinds = ("input", "weight", "grad_output")
        expected |= {f"fp8/experts.{weight}/{kind}/{name}" for kind in kinds for name in WORST}
        expected |= {f"fp8/experts.{weight}/update/{name}" for name in ("rms", "flushed")}
    assert set(series) - {"fp8/alarm", "fp8/loss"} == expected
    assert series["fp8/alarm"] == 0
    assert series["fp8/experts/experts/tokens_least"] == TOKENS_A_STEP * K / E
    for name, value in series.items():
        if name.endswith("/sqnr"):
            assert 30 < value < 34, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dead_expert_is_found_by_its_number(layout, tmp_path):
    watched = Watched(layout, tmp_path, monitor=2)
    watched.step(), watched.step()
    assert watched.logged[2]["fp8/experts/experts/empty"] == 0
    choice = watched.block.choice % E
    watched.block.choice = torch.where(choice == 2, 1, choice)
    watched.step()
    with pytest.warns(RuntimeWarning, match=r"experts/experts/empty = 1 > 0"):
        watched.step()
    assert watched.logged[4]["fp8/experts/experts/tokens_least"] == 0
    event = watched.monitor.events[-1]
    assert (event["event"], event["layer"]) == ("empty_experts", "experts")
    assert event["what"] == "no token since step 2 for experts 2 of 'experts'"
    assert any("for experts 2" in line for line in watched.said)
    assert {e["event"] for e in read_run(tmp_path).events} >= {"alarm", "empty_experts"}


def test_tokens_of_all_steps_since_the_last_measured_one_count():
    watched = Watched("plain", monitor=3)
    choice = watched.block.choice % E
    watched.block.choice = torch.where(choice == 2, 1, choice)
    watched.step(), watched.step()
    watched.block.choice = choice
    series = watched.step()
    assert series["fp8/experts/experts/empty"] == 0
    assert series["fp8/experts/experts/tokens_least"] == TOKENS_A_STEP * K / E
    assert series["fp8/experts/experts/tokens_most"] > 3 * TOKENS_A_STEP * K / E


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saturating_expert_is_found(layout, monkeypatch):
    watched, stock = Watched(layout), grouped.cast_stacked

    def planted(values, spec, flip, after):
        payload = stock(values, spec, flip)
        scale = payload.scale.clone()
        scale[1] /= 64
        source = values.transpose(1, 2) if flip else values
        codes = (source.float() / scale).clamp(-448, 448).to(payload.qdata.dtype)
        return payload._replace(qdata=codes, scale=scale)

    monkeypatch.setattr(grouped, "cast_stacked", planted)
    with pytest.warns(RuntimeWarning, match="weight/saturation"):
        series = watched.step()
    for weight in _names(watched.block):
        assert series[f"fp8/experts.{weight}/weight/saturation"] > 0.5
        assert series[f"fp8/experts.{weight}/weight/sqnr"] < 5
        assert series[f"fp8/experts.{weight}/input/saturation"] == 0


@pytest.mark.parametrize("layout", ["plain", "gpt-oss", "no-gate", "llama-4"])
def test_numbers_are_those_of_the_worst_expert(layout):
    watched = Watched(layout)
    watched.x[:, 0] *= torch.where(torch.arange(TOKENS_A_STEP) % 7 == 0, 3e4, 1.0)
    watched.block.choice = torch.where(torch.arange(TOKENS_A_STEP)[:, None] % 7 == 0, 3, 0) + (
        torch.arange(K)
    )
    with pytest.warns(RuntimeWarning):
        series = watched.step()
    x, spec = watched.x, watched.block.experts.fp8.recipe.input
    values = dequantize(quantize(x, spec))
    worst = []
    for expert in range(E):
        rows = (watched.block.choice % E == expert).any(1)
        exact, noise = x[rows], (x - values)[rows].square().sum()
        worst.append(decibel(exact.square().sum(), noise))
    place = f"fp8/experts.{_names(watched.block)[0]}/input"
    assert series[f"{place}/sqnr"] == pytest.approx(float(min(worst)), abs=0.05)
    flushed = ((values == 0) & (x != 0)).float()
    shares = [flushed[(watched.block.choice % E == e).any(1)].mean() for e in range(E)]
    assert series[f"{place}/underflow"] == pytest.approx(float(max(shares)), rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_counts_once(layout, reentrant):
    watched = Watched(layout)
    watched.x.requires_grad_()
    series = watched.step(lambda x: checkpoint(watched.block, x, use_reentrant=reentrant))
    assert series["fp8/experts/experts/tokens_most"] == TOKENS_A_STEP * K / E
    assert f"fp8/experts.{_names(watched.block)[0]}/grad_output/sqnr" in series


def test_weights_are_bit_for_bit_the_same():
    losses = []
    for monitor in (1, 10_000):
        watched = Watched("gpt-oss", monitor=monitor)
        for _ in range(3):
            watched.step()
        losses.append([p.detach().clone() for p in watched.block.parameters()])
    assert all(map(torch.equal, *losses))


def test_counting_and_looking_wait_for_nothing(monkeypatch):
    """The CPU's reference of grouped GEMMs asks for the ends of groups, as often as without."""
    fetches, counts = [], []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        stock = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda x, stock=stock: fetches.append(1) or stock(x)
        )
    for goes_on in (True, False):
        watched = Watched("plain", monitor=1)  # its first step is observed
        if not goes_on:
            watched.monitor.close()
        fetches.clear()
        with torch.autocast("cpu", torch.bfloat16):
            y = watched.block(watched.x)
        y.float().sum().backward()
        counts.append(len(fetches))
    assert counts[0] == counts[1] > 0
