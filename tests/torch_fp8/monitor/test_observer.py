import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_fp8.ops.scaled_mm
from tests.internals import RECIPES, LazyQuantizedTensor, format_of, linear_function, read_run
from tests.steps import monitored
from tests.torch_fp8.block_models import Norm
from tests.torch_fp8.nn.test_conv1d import Conv1D
from torch_fp8 import FP8Config, Monitor, convert_optimizer, convert_to_float8, revert
from torch_fp8.ops.quantize import QuantizedTensor, dequantize
from torch_fp8.ops.smooth import column_amax, smooth_factors

pytestmark = pytest.mark.filterwarnings("ignore:FP8 monitor, step")
M, K, N, OUT = 40, 160, 144, 176
KINDS = ("input", "weight", "grad_output")
COMPARED = ("amax", "scale", "sqnr", "saturation", "underflow")


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(K, N, bias=False)
        self.up_proj = nn.Linear(K, N, bias=False)
        self.down_proj = nn.Linear(N, OUT, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def _plain(x):
    if isinstance(x, LazyQuantizedTensor):
        x = x.production.producer.dense()
    return (x.reshape(-1, x.shape[-1]) * 1).detach()


class Watched:
    """A monitored model, the operands of its GEMMs, and the sources of one layer's operands."""

    def __init__(self, monkeypatch, *modules, layer=0, adapt=None, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(*modules)
        if adapt is not None:
            adapt(self.model)
        config = FP8Config(**{"opt_level": "O1", "monitor": 1, **options})
        convert_to_float8(self.model, config)
        self.layer = self.model.get_submodule(str(layer))
        self.prefix = f"fp8/{layer}/"
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained or [nn.Parameter(torch.ones(1))], lr=1e-3)
        if config.opt_level != "O1":
            convert_optimizer(self.optimizer, config, model=self.model)
        self.gemms, self.sources, self.logged, self.said = [], {}, {}, []
        parts = self.model, self.optimizer, config, self.logged
        self.monitor = monitored(*parts, say=self.said.append)
        operator = torch_fp8.ops.scaled_mm._operator

        def spied(*args):
            parts = [QuantizedTensor(x.clone(), s.clone(), g) for x, s, g in (args[:3], args[3:6])]
            self.gemms.append((*parts, args[6]))
            return operator(*args)

        monkeypatch.setattr(torch_fp8.ops.scaled_mm, "_operator", spied)
        self.layer.register_forward_pre_hook(self._before)
        self.layer.register_forward_hook(self._after)

    def _before(self, layer, args):
        with torch.no_grad():
            self.sources.setdefault("input", _plain(args[0]))
            self.sources.setdefault("weight", layer.weight * 1)

    def _after(self, layer, args, output):
        def on_gradient(gradient):
            self.sources.setdefault("grad_output", _plain(gradient))

        if output.requires_grad:
            output.register_hook(on_gradient)

    def step(self, forward=None, batches=(1.0,)):
        self.gemms.clear()
        self.sources.clear()
        for factor in batches:
            x = (torch.randn(M, K) * factor).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = self.model(x) if forward is None else forward(self.model, x)
            if y.requires_grad:
                (y.float().square().mean() * 1e-3).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.logged.get(self.monitor.step)

    def multiplied(self, which=(0, 0, 0)):
        """The payloads of each operand, (payload, whether it is the source's transpose)."""
        flip = self.layer.fp8.transposed
        n, k = self.layer.weight.shape[::-1] if flip else self.layer.weight.shape
        sizes = {"fprop": (M, n, k), "dgrad": (M, k, n), "wgrad": (k, n, M) if flip else (n, k, M)}
        made = {kind: [] for kind in KINDS}
        for (name, size), i in zip(sizes.items(), which, strict=True):
            found = [g for g in self.gemms if _sizes(g) == size]
            if not found and name != "fprop":  # one product of gate and up
                found = [self._member(name, g, n, i) for g in self.gemms if 2 * n in _sizes(g)]
                found = [g for g in found if _sizes(g) == size]
            if found:
                a, b, _ = found[min(i, len(found) - 1)]
                if name == "wgrad":
                    g, x = (b, a) if flip else (a, b)
                    made["grad_output"].append((g, True))
                    made["input"].append((x, True))
                else:
                    made["input" if name == "fprop" else "grad_output"].append((a, False))
                    made["weight"].append((b, (name == "dgrad") != flip))
        return made

    @staticmethod
    def _member(name, gemm, n, i):
        """A product of two layers with n features as that of one of them."""
        part, (a, b, contracted) = slice(i * n, (i + 1) * n), gemm
        if name == "wgrad":
            return a._replace(qdata=a.qdata[part]), b, contracted
        return *(x._replace(qdata=x.qdata[:, part]) for x in (a, b)), n

    def check(self, series, kinds=KINDS, which=(0, 0, 0)):
        made = self.multiplied(which)
        for kind in kinds:
            assert made[kind]
            want = _worst([_statistics(self.sources[kind], *payload) for payload in made[kind]])
            self.compare(series, kind, want)

    def compare(self, series, kind, want):
        for name in COMPARED:
            got = series[f"{self.prefix}{kind}/{name}"]
            room = 1e-5 if name == "sqnr" else 1e-12
            assert got == pytest.approx(want[name], rel=2e-3, abs=room), (kind, name)


def _sizes(gemm):
    return len(gemm[0].qdata), len(gemm[1].qdata), gemm[2]


def _statistics(source, payload, turned):
    exact = (source.t() if turned else source).float()
    kept = dequantize(payload)[:, : exact.shape[1]]
    codes, format = payload.qdata.float()[:, : exact.shape[1]].abs(), format_of(payload[0].dtype)
    room = 1.1 if format.max > 1000 else 1.05
    beyond = (codes >= format.max) & (exact.abs() > room * kept.abs())
    signal, noise = exact.square().sum().item(), (exact - kept).square().sum().item()
    lost = ((kept == 0) & (exact != 0)).sum() / (exact != 0).sum()
    amax = exact.abs().max().item()
    return {
        "amax": math.inf if math.isnan(amax) else amax,
        "scale": payload.scale.max().item(),
        "sqnr": 10 * math.log10(signal / max(noise, 1e-38)) if noise < math.inf else -math.inf,
        "saturation": beyond.float().mean().item(),
        "underflow": lost.item(),
    }


def _worst(found):
    return {name: (min if name == "sqnr" else max)(s[name] for s in found) for name in COMPARED}


@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_are_those_of_the_operands(monkeypatch, recipe):
    watched = Watched(monkeypatch, nn.Linear(K, N), recipe=recipe)
    for batches in ((1.0,), (30.0, 1e4), (1.0,)):  # the second micro-batch does not count
        watched.check(watched.step(batches=batches))
    tokens = 10 ** torch.linspace(-3, 3, M)[:, None]
    series = watched.step(lambda model, x: model(x * tokens) * tokens)  # columns have other scales
    watched.check(series)
    if recipe in ("rowwise", "blockwise", "mxfp8"):
        for kind in ("input", "grad_output"):
            row, col = (_statistics(watched.sources[kind], *p) for p in watched.multiplied()[kind])
            assert row["underflow"] < 0.01 < col["underflow"] == series[f"fp8/0/{kind}/underflow"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_are_those_of_weights_that_are_stored_transposed(monkeypatch, recipe):
    watched = Watched(monkeypatch, Conv1D(N, K), recipe=recipe)
    for _ in range(2 if recipe == "delayed" else 1):
        watched.check(watched.step())


@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_are_those_of_smoothed_operands(monkeypatch, recipe):
    """fprop takes x s and w / s, wgrad takes x s, and dgrad takes w."""
    options = {"layer": "0.down_proj", "recipe": recipe, "smooth_swiglu": True}
    watched = Watched(monkeypatch, MLP(), **options)
    for _ in range(2 if recipe == "delayed" else 1):
        series = watched.step()
        factors, inverse, _ = smooth_factors(column_amax(watched.sources["input"]))
        watched.sources["input"] = watched.sources["input"] * factors
        watched.check(series, ("input", "grad_output"))
        weight, (fprop, dgrad) = watched.sources["weight"], watched.multiplied()["weight"]
        found = [_statistics(weight * inverse, *fprop), _statistics(weight, *dgrad)]
        watched.compare(series, "weight", _worst(found))


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "delayed"])
def test_statistics_are_those_of_cached_weights(monkeypatch, recipe):
    options = {"recipe": recipe, "opt_level": "O2", "cache_weights": True}
    watched = Watched(monkeypatch, nn.Linear(K, N), **options)
    halves, current = watched.layer.weight.halves, []
    watched.optimizer.register_step_pre_hook(lambda *_: current.append(halves.is_filled))
    for _ in range(3):
        watched.check(watched.step())
    assert current == [True] * 3  # the monitor's reading is no use of the weight


def test_a_stale_payload_is_not_hidden_by_the_monitor(monkeypatch):
    options = {"recipe": "tensorwise", "opt_level": "O2", "cache_weights": True}
    watched = Watched(monkeypatch, nn.Linear(K, N), **options)
    watched.step()
    watched.layer.weight.halves.payload.qdata.view(torch.uint8).zero_()
    series = watched.step()
    assert series["fp8/0/weight/underflow"] == 1
    watched.check(series)


@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_are_those_of_weights_in_forwards_without_gradients(monkeypatch, recipe):
    def twice(model, x):
        with torch.no_grad():
            model(x)
            return model(x)

    watched = Watched(monkeypatch, nn.Linear(K, N), recipe=recipe, opt_level="O1")
    for _ in range(3):
        watched.check(watched.step(twice), kinds=("input", "weight"))
    watched.model.eval()
    assert "fp8/0/input/amax" not in watched.step(twice)  # generation, or a validation
    watched.monitor.close()


@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_are_those_of_frozen_weights(monkeypatch, recipe):
    adapt = lambda model: model.requires_grad_(False)  # noqa: E731
    options = {"recipe": recipe, "adapt": adapt}
    watched = Watched(monkeypatch, nn.Linear(K, N), **options)
    for _ in range(2):
        watched.check(watched.step())


@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_are_those_of_what_norms_and_gated_mlps_hand_over(monkeypatch, recipe):
    for layer in ("1.down_proj", "1.gate_proj"):
        watched = Watched(monkeypatch, Norm(K), MLP(), layer=layer, recipe=recipe)
        for _ in range(2 if recipe == "delayed" else 1):
            series, errors = watched.step(), []
            for which in itertools.product((0, 1), repeat=3):  # GEMMs of gate and up look alike
                try:
                    watched.check(series, which=which)
                except AssertionError as error:
                    errors.append(error)
            assert len(errors) == (0 if layer.endswith("down_proj") else 7), errors[0]


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "mxfp8"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_statistics_are_those_of_both_passes_of_a_checkpoint(monkeypatch, recipe, reentrant):
    watched = Watched(monkeypatch, nn.Linear(K, N), recipe=recipe)
    forward = lambda model, x: checkpoint(model, x, use_reentrant=reentrant)  # noqa: E731
    for batches in ((1.0,), (30.0, 1e4)):
        series = watched.step(forward, batches)
        watched.check(series)


@pytest.mark.parametrize("factor", [1e4, 100.0, 1e-4, math.inf, math.nan])
def test_a_weight_that_changes_between_steps_has_the_scale_that_it_was_cast_with(
    monkeypatch, factor
):
    watched = Watched(monkeypatch, nn.Linear(K, N), recipe="delayed", amax_history_len=8)
    for _ in range(2):
        watched.step()
    with torch.no_grad():
        if math.isfinite(factor):
            watched.layer.weight.mul_(factor)
        else:
            watched.layer.weight[3, 5] = factor
    scale = watched.logged[2]["fp8/0/weight/scale"]
    series = watched.step()
    watched.check(series, ("input", "weight"))
    assert series["fp8/0/weight/scale"] == pytest.approx(scale, rel=0.1)
    if factor == 1e-4:  # the old scale has 23 dB left for it
        assert series["fp8/alarm"] == 0
        return
    assert series["fp8/alarm"] >= 1
    alarms = [e for e in watched.monitor.events if e["event"] == "alarm"]
    assert [e["step"] for e in alarms] == [3]
    assert "fp8/0/weight/" in alarms[0]["what"]
    left_out = [e for e in watched.monitor.events if e["event"] == "left_out"]
    assert len(left_out) == (factor == 1e4)


@pytest.mark.parametrize("every", [1, 5])
def test_an_amax_that_a_history_leaves_out_is_an_event_once(monkeypatch, every, tmp_path):
    watched = Watched(monkeypatch, nn.Linear(K, N), recipe="delayed", monitor=every)
    watched.monitor.close()
    config, said = watched.monitor.config, []
    of_run = watched.model, watched.optimizer, config, watched.logged
    watched.monitor = monitored(*of_run, folder=tmp_path, say=said.append)
    for step in range(1, 21):
        if step in (6, 17):
            with torch.no_grad():
                watched.layer.weight.mul_(1e5)
        watched.step()
    steps = [6, 17] if every == 1 else [10, 20]
    events = [e for e in read_run(tmp_path).events if e["event"] == "left_out"]
    of_weight = [e for e in events if "history/weight" in e["what"]]
    assert [(e["step"], e["layer"]) for e in of_weight] == [(step, "0") for step in steps]
    assert f"1 amax(es) of the weight since step {steps[0] - every}" in of_weight[0]["what"]
    assert sum("history/weight" in line for line in said) == 2
    assert [watched.logged[s]["fp8/0/history/weight"] for s in steps] == [1, 1]
    assert all(watched.logged[s]["fp8/alarm"] >= 1 for s in steps)
    alarms = [e for e in watched.monitor.events if e["event"] == "alarm"]
    assert steps[0] in [e["step"] for e in alarms]


def test_marks_that_were_told_are_struck_and_the_guard_goes_on_as_it_did(monkeypatch):
    """The newest mark is what the guard goes by: one amax is left out, the next is recorded."""
    plain = copy.deepcopy(nn.Linear(K, N))
    histories = []
    for monitor in (0, 1):
        watched = None
        layer = nn.Sequential(copy.deepcopy(plain))
        config = FP8Config(recipe="delayed", opt_level="O1", monitor=monitor, amax_history_len=16)
        convert_to_float8(layer, config)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        watched = Monitor(layer, [optimizer], config) if monitor else None
        generator = torch.Generator().manual_seed(0)
        for step in range(8):
            x = torch.randn(M, K, generator=generator) * (1e5 if step in (3, 5, 6) else 1)
            layer(x).sum().backward()
            optimizer.step()
        histories.append(layer[0].fp8_amax_history[0].clone())
        if watched is not None:
            counts = [e["step"] for e in watched.events if e["event"] == "left_out"]
            assert counts == [4, 6]
    assert torch.equal(histories[0].abs(), histories[1].abs())
    assert not histories[1].signbit().any()
    assert histories[0].signbit().sum() == 2


def test_a_layer_that_nobody_observes_calls_no_monitor(monkeypatch):
    """Between measured steps a layer has the quantizers that it has without a monitor."""
    watched = Watched(monkeypatch, nn.Linear(K, N), recipe="delayed", monitor=2)
    seen = []
    monkeypatch.setattr(
        linear_function.LinearFunction,
        "apply",
        lambda *args, apply=linear_function.LinearFunction.apply: (
            seen.append(args[4].quantizers.observer is not None) or apply(*args)
        ),
    )
    for _ in range(4):
        watched.step()
    assert seen == [False, True, False, True]
    assert watched.layer.fp8.observer is None


def test_a_layer_that_is_reverted_in_a_measured_step_is_observed_no_longer(monkeypatch):
    watched = Watched(monkeypatch, nn.Linear(K, N), nn.Linear(N, OUT), recipe="rowwise")
    watched.step()
    revert(watched.layer)
    assert "fp8" not in watched.layer.__dict__
    for _ in range(2):
        series = watched.step()
        assert "fp8/1/input/sqnr" in series
        assert "fp8/0/input/sqnr" not in series
    assert not watched.monitor._events.has_failed
