"""What recipe="auto" chooses for experts, with times that are given instead of measured."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.internals import (
    EXPERTS,
    Float8Experts,
    autotune,
    expert_choice,
    expert_shape,
    layer_benchmark,
)
from tests.moe_experts import CONFIG, LAYOUTS, E, H, K, experts
from torch_fp8 import FP8Config, convert_to_float8

AUTO = FP8Config(tokens=64)


class Clock:
    """Stands for a card's: microseconds without FP8 and with, by the class of the experts."""

    def __init__(self, plain, fp8):
        self.us, self.runs = (plain, fp8), []

    def __call__(self, device, run):
        run()
        self.runs.append(run)
        return 1e-6 * self.us[run.recipe is not None]


@pytest.fixture
def clock(monkeypatch):
    def install(plain, fp8):
        expert_choice._times.clear()
        clock = Clock(plain, fp8)
        monkeypatch.setattr(layer_benchmark, "seconds", clock)
        monkeypatch.setattr(expert_choice, "grouped_natively", lambda device: True)
        return clock

    yield install
    expert_choice._times.clear()


class Model(nn.Module):
    """A linear layer, and experts."""

    def __init__(self, layout="plain", **changes):
        super().__init__()
        self.proj = nn.Linear(H, H)
        self.experts = experts(layout, **changes)
        self.experts.config = SimpleNamespace(**CONFIG | {"num_experts_per_tok": K} | changes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_gain_run_in_fp8(layout, clock):
    clock(106, 100)
    report = convert_to_float8(Model(layout), AUTO)
    assert len(report.experts) == 2
    assert "64" in str(report.choice.experts)
    rows = 64 if layout == "llama-4" else 64 * K // E
    assert f"{rows} rows each: 1.06 times as fast as BF16" in report.summary()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_gain_too_little_stay_and_the_summary_says_so(layout, clock):
    clock(104, 100)
    model = Model(layout)
    stock = type(model.experts)
    report = convert_to_float8(model, AUTO)
    assert report.experts == ()
    assert report.converted == ("proj",)
    assert type(model.experts) is stock
    reasons = {s.reason for s in report.skipped}
    assert len(report.skipped) == 2
    assert len(reasons) == 1
    assert "experts are 1.04 times as fast in FP8, below the 1.05 required" in report.summary()


def test_a_second_conversion_with_other_times_takes_experts_back(clock):
    model = Model()
    clock(200, 100)
    assert len(convert_to_float8(model, AUTO).experts) == 2
    clock(100, 100)
    assert convert_to_float8(model, AUTO).experts == ()
    assert not isinstance(model.experts, Float8Experts)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_timed_trains_with_the_rows_of_the_job(layout, clock, monkeypatch):
    watch, count = clock(200, 100), 2 * EXPERTS
    sizes = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")
    model = Model(layout, **dict.fromkeys(sizes, count))
    before = copy.deepcopy(model.state_dict())
    model.experts.config._experts_implementation = "eager"
    torch.manual_seed(3)
    state = torch.get_rng_state()
    convert_to_float8(model, FP8Config(tokens=256))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    rows = 256 if layout == "llama-4" else 256 * K // count
    for timed in watch.runs:
        first = next(p for p in timed.module.parameters() if p.ndim == 3)
        assert (first.shape[0], first.dtype) == (EXPERTS, torch.bfloat16)
        assert isinstance(timed.module, Float8Experts) == (timed.recipe is not None)
        if layout == "llama-4":
            assert len(timed.arguments[0]) == EXPERTS * rows
        else:
            x, index, _ = timed.arguments
            assert (len(x), index.shape) == (rows * EXPERTS // K, (rows * EXPERTS // K, K))
            assert torch.bincount(index.flatten()).tolist() == [rows] * EXPERTS
        if layout != "llama-4":
            assert timed.module.config._experts_implementation == "grouped_mm"
    assert {timed.recipe is None for timed in watch.runs} == {True, False}


def test_each_shape_is_timed_once(clock):
    watch = clock(200, 100)
    net = nn.ModuleList([Model(), Model(), Model("gpt-oss")])
    assert len(convert_to_float8(net, AUTO).experts) == 6
    each = layer_benchmark.WARMUP + layer_benchmark.REPETITIONS
    assert len(watch.runs) == 2 * 2 * each
    convert_to_float8(nn.ModuleList([Model()]), AUTO)  # in this process
    assert len(watch.runs) == 2 * 2 * each
    convert_to_float8(Model(), FP8Config(tokens=64, wgrad="bf16"))
    assert len(watch.runs) == 3 * 2 * each


@pytest.mark.parametrize(
    "config",
    [FP8Config(recipe="rowwise"), FP8Config(overrides={"experts": {"recipe": "rowwise"}})],
    ids=["named", "named-for-experts"],
)
def test_a_named_recipe_measures_nothing(config, clock):
    watch = clock(1, 100)
    assert len(convert_to_float8(Model(), config).experts) == 2
    assert not watch.runs


def test_on_a_cpu_experts_run_emulated_unmeasured(monkeypatch):
    monkeypatch.setattr(layer_benchmark, "seconds", None)
    report = convert_to_float8(Model(), AUTO)
    assert len(report.experts) == 2
    assert not report.choice.experts.speedups


def test_experts_with_adapters_stay_in_fp8(clock):
    watch = clock(1, 100)

    class Adapter(nn.Module):
        num_experts, parameter_name = E, "gate_up_proj"

        def __init__(self, base):
            super().__init__()
            self.base = base

        def get_base_layer(self):
            return self.base

        def get_delta_factors(self, name):
            raise NotImplementedError

        def _activate_lora(self, names):
            raise NotImplementedError

    model = Model()
    model.adapted = Adapter(model.experts)
    assert len(convert_to_float8(model, AUTO).experts) == 2
    assert not watch.runs


def test_a_failure_is_a_warning_and_leaves_fp8(clock, monkeypatch):
    clock(1, 100)

    def fail(device, run):
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(layer_benchmark, "seconds", fail)
    with pytest.warns(
        UserWarning, match="experts in FP8 without measuring: timing 4 experts .* no mem"
    ):
        report = convert_to_float8(Model(), AUTO)
    assert len(report.experts) == 2


def test_ranks_take_the_answer_of_one(clock, monkeypatch):
    watch, questions = clock(200, 100), []

    def answer_of_one(question, answer):
        questions.append(question)
        return json.dumps({"times": [[1.0, 1.0]]})

    monkeypatch.setattr(autotune, "answer_of_one", answer_of_one)
    assert convert_to_float8(Model(), AUTO).experts == ()
    assert convert_to_float8(Model(), AUTO).experts == ()
    assert len(set(questions)) == 1
    assert not watch.runs


def test_expert_parallelism_has_more_rows_of_fewer_experts():
    module = experts("plain")
    module.num_experts = E // 2  # of this rank; the weight shows those of all
    module.config = SimpleNamespace(num_experts_per_tok=K)
    shape = expert_shape(module, 64)
    assert (shape.num_experts, shape.rows) == (E // 2, 64 * K // (E // 2))
