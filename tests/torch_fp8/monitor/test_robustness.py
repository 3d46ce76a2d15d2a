import copy
import io
import math
import warnings

import pytest
import torch
from torch import nn

from tests.internals import LossSpikes, is_paused, read_run
from tests.torch_fp8.monitor.test_faults import Watched, _outlier_channel
from tests.waits import Waits
from torch_fp8 import FP8Config, Monitor, convert_to_float8

pytestmark = pytest.mark.filterwarnings("ignore:FP8 monitor, step")


class _Headed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        self.lm_head = nn.Linear(64, 64)

    def forward(self, x):
        return self.lm_head(self.layers(x))


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_measured_step_waits_for_the_device_once_however_many_layers(opt_level):
    counts = {}
    for layers in (1, 4):
        model = _Headed(layers)
        probes = ("clip_search", "logit_sharpness")
        options = {"recipe": "tensorwise", "opt_level": opt_level, "skip": ("lm_head",)}
        config = FP8Config(**options, monitor=3, monitor_probes=probes, on_alarm="bf16")
        convert_to_float8(model, config)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        monitor = Monitor(model, [optimizer], config)
        of_steps = []
        for _ in range(6):
            loss = nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.arange(16))
            loss.backward()
            monitor.observe_loss(loss)
            with Waits() as waits:
                optimizer.step()
            optimizer.zero_grad()
            of_steps.append(waits.count)
        with Waits() as waits:  # and in the forward and the backward of a measured step
            monitor._observer.install()
            nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.arange(16)).backward()
        counts[layers] = of_steps, waits.count
        assert len(monitor._observer.seen) == 3 * layers + 1
    assert counts[1] == counts[4]
    assert counts[4][0][5] - counts[4][0][4] <= 1


def test_nan_in_a_tensor_is_the_worst_of_each_statistic():
    watched = Watched(recipe="tensorwise")

    def with_nan(x):
        x = x.clone()
        x[3, 5] = math.nan
        return x

    watched.step()
    watched.in_x = with_nan
    watched.step()
    series = watched.logged[2]
    assert series["fp8/0/input/sqnr"] == -math.inf
    for statistic in ("amax", "outliers", "kurtosis", "direction_error"):
        assert series[f"fp8/0/input/{statistic}"] == math.inf
    assert {"fp8/0/input/sqnr", "fp8/0/input/amax"} <= watched.crossed()


def test_copies_and_files_of_a_model_in_a_measured_step_have_no_observer():
    watched = Watched(recipe="tensorwise", opt_level="O1")
    watched.step()
    assert watched.model[0].fp8.observer is not None  # the next step is to be measured
    twin = copy.deepcopy(watched.model)
    file = io.BytesIO()
    torch.save(watched.model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        assert other[0].fp8.observer is None
        other(torch.full((16, 64), 1e6)).sum().backward()
    watched.step()
    assert watched.logged[2]["fp8/0/input/amax"] < 100


def test_a_stance_of_the_users_own_comes_back():
    model = nn.Sequential(nn.Linear(64, 64))
    config = FP8Config(recipe="tensorwise", opt_level="O1", monitor=1)
    convert_to_float8(model, config)
    model[0].compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    from torch._dynamo.eval_frame import _stance

    with torch.compiler.set_stance("eager_on_recompile"):
        monitor = Monitor(model, [optimizer], config)
        model(torch.randn(8, 64)).sum().backward()
        monitor._observer.remove()
        stance = torch._dynamo.eval_frame._stance.stance
    monitor.close()
    assert stance == "eager_on_recompile"
    assert _stance.stance == "default"


def test_a_compiled_optimizer_step_is_measured():
    watched = Watched(recipe="tensorwise", opt_level="O1", monitor=2)
    step = torch.compile(lambda: watched.optimizer.step(), backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            watched.model(torch.randn(16, 64)).sum().backward()
            step()
            watched.optimizer.zero_grad()
    assert not any("monitor failed" in str(w.message) for w in caught)
    assert sorted(watched.logged) == [2, 4]
    assert "fp8/0/update/rms" in watched.logged[4]


def test_losses_of_a_step_are_added_as_gradients_are(tmp_path):
    watched = Watched(recipe="tensorwise", opt_level="O1", monitor=2)
    for _ in range(4):
        for loss in (1.5, 0.5, None, torch.zeros(2)):  # what is no loss is none
            watched.monitor.observe_loss(None if loss is None else torch.as_tensor(loss))
        watched.model(torch.randn(16, 64)).sum().backward()
        watched.optimizer.step()
    assert [watched.logged[s]["fp8/loss"] for s in (2, 4)] == [2.0, 2.0]


def test_of_losses_that_are_nan_for_ever_few_are_told():
    watched = Watched(recipe="tensorwise", opt_level="O1", monitor=50)

    def train():
        for _ in range(120):
            watched.monitor.observe_loss(torch.tensor(math.nan))
            watched.model[0].weight.grad = torch.zeros_like(watched.model[0].weight)
            watched.optimizer.step()

    with pytest.warns(RuntimeWarning) as caught:
        train()
    told = [str(w.message) for w in caught if "the loss of step" in str(w.message)]
    assert [text.split(":")[0].split()[-1] for text in told] == ["1", "100"]
    assert told[1].endswith("far above the last ones, as are the 99 before it")
    spikes = LossSpikes()
    assert [spikes.count(x) for x in (1.0, math.inf, math.nan, 1.0, math.nan)] == [0, 1, 2, 0, 1]


def test_what_fails_in_it_never_stops_a_run(monkeypatch):
    watched = Watched(recipe="tensorwise", opt_level="O1")

    def fails(*args, **kwargs):
        raise RuntimeError("broken")

    vector = watched.monitor.series.vector
    for place, name in (
        (watched.monitor._observer, "install"),
        (watched.monitor._losses, "add"),
        (watched.monitor.fallback, "judge"),
    ):
        monkeypatch.setattr(place, name, fails)
    broken = lambda seen, device: fails() if seen else vector(seen, device)  # noqa: E731
    monkeypatch.setattr(watched.monitor.series, "vector", broken)

    def train():
        for _ in range(3):
            watched.step()

    with pytest.warns(RuntimeWarning, match="the FP8 monitor failed at step 1.*broken") as caught:
        train()
    assert sum("monitor failed" in str(w.message) for w in caught) == 1
    assert watched.monitor.step == 3


@pytest.mark.filterwarnings("ignore:the FP8 monitor failed at step 2")
def test_a_rank_that_cannot_write_acts_as_the_others_do(tmp_path):
    """The disk of rank zero is full: the others do not know."""
    watched = Watched(recipe="tensorwise", opt_level="O1", on_alarm="bf16", fallback_steps=9)
    watched.step()

    class Full:
        def write(self, step, **what):
            raise OSError("no space left on device")

    watched.monitor._events.file = Full()
    watched.monitor._events.has_failed = False
    for _ in range(18):
        watched.step()
    watched.monitor._events.has_failed = False
    _outlier_channel(watched)
    with pytest.warns(RuntimeWarning, match="monitor failed at step 20.*no space left"):
        watched.step()
    assert is_paused(watched.model[0])
    assert "fp8/0/input/sqnr" in watched.logged[20]


@pytest.mark.parametrize("on_alarm", ["bf16", "rowwise"])
def test_a_smooth_down_projection_falls_back_and_returns_smooth(on_alarm):
    watched = Watched(recipe="delayed", smooth_swiglu=True, on_alarm=on_alarm, fallback_steps=2)
    down = watched.model[1].down_proj
    watched.step()
    with torch.no_grad():
        kept = watched.model[1].up_proj.weight[7].clone()
        watched.model[1].up_proj.weight[7] = watched.model[1].gate_proj.weight[7]
    watched.step()
    assert is_paused(down) == (on_alarm == "bf16")
    assert down.fp8.recipe.smooth
    assert down.fp8.recipe.name == ("delayed" if on_alarm == "bf16" else "rowwise")
    watched.step()
    assert watched.logged[3]["fp8/1.down_proj/input/sqnr"] > 25
    with torch.no_grad():
        watched.model[1].up_proj.weight[7] = kept
    for _ in range(3):
        watched.step()
    assert not is_paused(down)
    assert (down.fp8.recipe.name, down.fp8.recipe.smooth) == ("delayed", True)
    assert watched.logged[6]["fp8/1.down_proj/input/sqnr"] > 28


def test_layers_that_never_ran_and_tokens_that_are_none_are_missing(tmp_path):
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("used", "empty", "idle")})
    config = FP8Config(recipe="tensorwise", opt_level="O1", monitor=1, on_alarm="bf16")
    convert_to_float8(model, config)
    optimizer, logged = torch.optim.AdamW(model.parameters()), {}
    monitor = Monitor(
        model, [optimizer], config, folder=tmp_path, log=lambda s, step: logged.update(s)
    )
    for _ in range(2):
        y = model["used"](torch.randn(17, 64))
        (y.sum() + model["empty"](torch.randn(0, 64)).sum()).backward()
        optimizer.step()
    monitor.close()
    assert "fp8/used/input/sqnr" in logged
    assert not any(n.startswith(("fp8/idle/input", "fp8/empty/input")) for n in logged)
    assert logged["fp8/alarm"] == 0
    assert not any(n.startswith("fp8/idle/input") for n in read_run(tmp_path).values)


def test_what_a_run_did_after_the_checkpoint_that_it_goes_on_from_holds_no_more(tmp_path):
    def run(state, steps, outlier):
        watched = Watched(recipe="tensorwise", opt_level="O1", monitor=2, on_alarm="bf16")
        layers = [name for name, _ in watched.monitor._layers]
        watched.monitor.close()
        config = watched.monitor.config
        monitor = watched.monitor = Monitor(
            watched.model, [watched.optimizer], config, folder=tmp_path
        )
        monitor.load_state_dict(state)
        states = {}
        for _ in range(steps):
            if monitor.step + 1 == outlier:
                _outlier_channel(watched)
            watched.step()
            states[monitor.step] = monitor.state_dict()
        monitor.flush()
        return layers, states

    layers, states = run({}, 9, outlier=8)
    assert {e["layer"] for e in read_run(tmp_path).events if e["event"] == "fallback"} <= {*layers}
    run(states[5], 2, outlier=0)
    record = read_run(tmp_path)
    assert record.steps == [2, 4, 6]
    assert sorted(record.losses) == [1, 2, 3, 4, 5, 6, 7]
    assert (record.events, record.notes) == ([], [])
    run({}, 3, outlier=0)
    record = read_run(tmp_path)
    assert (record.steps, sorted(record.losses)) == ([2], [1, 2, 3])
    assert record.notes == ["The file begins with an earlier run, which is not drawn."]
