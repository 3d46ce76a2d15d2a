"""What recipe="auto" chooses, with times that are given instead of measured."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM

from tests.internals import (
    MARGIN,
    SplitWeight,
    candidates,
    check_style,
    halves_of,
    layer_benchmark,
    layer_times,
)
from tests.models import llama_config
from torch_fp8 import Float8Linear, FP8Config, convert_optimizer, convert_to_float8

AUTO = FP8Config(tokens=16)
H200 = torch.device("cuda:0")


@pytest.fixture
def cuda(monkeypatch):
    """``cuda(capability, version)``: the card and the CUDA that there are."""

    def install(capability, version=(12, 9)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
        monkeypatch.setattr("torch_fp8.ops.hardware._cuda_version", lambda: version)
        monkeypatch.setattr("torch_fp8.conversion.convert.check_driver", lambda device: None)

    return install


def fp8(tensorwise, rowwise=1000, blockwise=1000):
    return {"tensorwise": tensorwise, "rowwise": rowwise, "blockwise": blockwise}


def model():
    """Three layers of 64x32, one of 32x64, one of 16x32."""
    wide = [nn.Linear(32, 64) for _ in range(3)]
    return nn.ModuleDict(
        {"wide": nn.ModuleList(wide), "narrow": nn.Linear(64, 32), "small": nn.Linear(32, 16)}
    )


WIDE, NARROW, SMALL = (64, 32), (32, 64), (16, 32)


def test_the_recipe_with_the_least_time_over_all_layers(timed):
    timed(
        {
            WIDE: (100, fp8(60, 70, 58)),  # three of them
            NARROW: (100, fp8(50, 80, 54)),
            SMALL: (10, fp8(5, 5, 5)),
        }
    )
    report = convert_to_float8(model(), AUTO)
    assert report.recipe.name == "blockwise"
    assert len(report.converted) == 5
    assert report.skipped == ()
    assert report.choice.speedups == pytest.approx(
        {"tensorwise": 410 / 235, "rowwise": 410 / 295, "blockwise": 410 / 233}
    )
    lines = report.summary().splitlines()
    assert any(line.startswith("  recipe    auto -> blockwise: ") for line in lines)
    assert (
        "  measured  blockwise 1.76 times as fast as BF16 (tensorwise 1.74, rowwise 1.39), linear "
        "layers only, forward and backward of 16 tokens"
    ) in lines


def test_a_layer_that_is_no_faster_stays_in_bf16(timed):
    timed({WIDE: (100, fp8(60)), NARROW: (100, fp8(60)), SMALL: (41, fp8(63))})
    net = model()
    report = convert_to_float8(net, AUTO)
    assert report.converted == ("wide.0", "wide.1", "wide.2", "narrow")
    reason = "16x32 is not faster in FP8: 63 us against 41 us in BF16 at 16 tokens"
    assert report.skipped == (("small", reason),)
    assert f"  skipped   small: {reason}" in report.summary().splitlines()
    assert report.flops_share < 1
    assert type(net["small"]) is nn.Linear
    assert net["narrow"].fp8.recipe.name == "tensorwise"
    assert net["narrow"].fp8.config == AUTO


@pytest.mark.parametrize(("us", "converted"), [(1 - 2 * MARGIN, 5), (1 - MARGIN / 2, 4), (1, 4)])
def test_it_has_to_be_faster_by_a_margin(timed, us, converted):
    timed({WIDE: (100, fp8(60)), NARROW: (100, fp8(60)), SMALL: (40, fp8(40 * us))})
    assert len(convert_to_float8(model(), AUTO).converted) == converted


def test_layers_that_would_stay_in_bf16_count_as_that(timed):
    timed(
        {
            WIDE: (100, fp8(60, 50)),
            NARROW: (100, fp8(60, 300)),  # rowwise loses by far, but only where it does not run
            SMALL: (10, fp8(5, 5)),
        }
    )
    report = convert_to_float8(model(), AUTO)
    assert report.recipe.name == "tensorwise"  # 245 against 255 us
    timed({WIDE: (100, fp8(60, 40)), NARROW: (100, fp8(60, 300)), SMALL: (10, fp8(5, 5))})
    layer_times.cache_clear()
    report = convert_to_float8(model(), AUTO)
    assert report.recipe.name == "rowwise"  # 225 against 245
    assert [name for name, _ in report.skipped] == ["narrow"]


def test_a_second_conversion_measures_nothing_and_chooses_the_same(timed):
    timer = timed({WIDE: (100, fp8(60)), NARROW: (100, fp8(60)), SMALL: (41, fp8(63))})
    net = model()
    first = convert_to_float8(net, AUTO)
    per_shape = (layer_benchmark.WARMUP + layer_benchmark.REPETITIONS) * 4
    assert len(timer.runs) == 3 * per_shape
    assert all(run.x.shape[0] == 16 for run in timer.runs)
    for other in (net, model()):
        again = convert_to_float8(other, AUTO)
        assert (again.converted, again.skipped) == (first.converted, first.skipped)
    assert len(timer.runs) == 3 * per_shape
    convert_to_float8(net, dataclasses.replace(AUTO, tokens=32))
    assert len(timer.runs) == 6 * per_shape
    convert_to_float8(model().bfloat16(), AUTO)  # whose weights keep no scale from step to step
    assert len(timer.runs) == 9 * per_shape


def test_a_named_recipe_turns_the_layers_left_into_fp8(timed):
    timer = timed({WIDE: (100, fp8(60)), NARROW: (100, fp8(60)), SMALL: (41, fp8(63))})
    net = model()
    convert_to_float8(net, FP8Config(recipe="tensorwise"))
    assert isinstance(net["small"], Float8Linear)
    assert not timer.runs
    convert_to_float8(net, AUTO)
    assert type(net["small"]) is nn.Linear
    assert convert_to_float8(net, FP8Config(recipe="rowwise")).choice is None
    assert net["small"].fp8.recipe.name == "rowwise"


def test_every_candidate_has_the_users_options(timed):
    timer = timed({WIDE: (100, fp8(60)), NARROW: (100, fp8(60)), SMALL: (10, fp8(5))})
    config = FP8Config(tokens=16, wgrad="bf16", grad_format="e4m3", fast_accum=("dgrad",))
    convert_to_float8(model(), config)
    recipes = {run.recipe.name: run.recipe for run in timer.runs if run.recipe is not None}
    assert set(recipes) == {"tensorwise", "rowwise", "blockwise"}
    for recipe in recipes.values():
        assert recipe.wgrad is None
        assert recipe.grad_output.format.name == "e4m3"
    assert [recipes["rowwise"].fprop.fast_accum, recipes["rowwise"].dgrad.fast_accum] == [0, 1]
    assert convert_to_float8(model(), config).recipe == recipes["tensorwise"]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("cache", [False, True])
def test_layers_are_timed_with_what_is_kept_of_their_weights(timed, cache, level):
    timer = timed({shape: (100, fp8(60)) for shape in (WIDE, NARROW, SMALL)})
    if level == "O1":
        cache = False
    convert_to_float8(model(), dataclasses.replace(AUTO, opt_level="O3", cache_weights=False))
    runs = len(timer.runs)
    convert_to_float8(model(), dataclasses.replace(AUTO, opt_level=level, cache_weights=cache))
    fresh = timer.runs[runs:] if cache or level == "O1" else timer.runs
    assert fresh
    halves = [halves_of(r.layers[0].weight) for r in fresh if r.recipe]
    if level == "O1":
        assert not any(halves)
    assert {h is not None and h.payload is not None for h in halves} == {cache}


@pytest.mark.parametrize(
    ("config", "capability", "version", "expected"),
    [
        (FP8Config(), (9, 0), (12, 9), ("tensorwise", "rowwise", "blockwise")),
        (FP8Config(), (9, 0), (12, 8), ("tensorwise", "rowwise")),
        (FP8Config(), (10, 0), (12, 9), ("tensorwise", "rowwise")),
        (FP8Config(), (8, 9), (12, 9), ("tensorwise", "rowwise")),
        (FP8Config(grad_format="e5m2"), (9, 0), (12, 9), ("tensorwise", "rowwise")),
        (FP8Config(emulate=True), (9, 0), (12, 9), ()),
        (FP8Config(recipe="rowwise"), (9, 0), (12, 9), ()),
        (FP8Config(backend="transformer-engine"), (9, 0), (12, 9), ()),
    ],
    ids=["sm_90", "older-cuda", "sm_100", "sm_89", "e5m2", "emulated", "named", "te"],
)
def test_candidates_are_what_the_card_runs_natively(cuda, config, capability, version, expected):
    cuda(capability, version)
    assert candidates(config, H200) == expected


@pytest.mark.parametrize(
    ("config", "device", "why"),
    [
        (FP8Config(), None, "FP8 is emulated here"),
        (FP8Config(), "meta", "FP8 is emulated here"),
        (FP8Config(emulate=True), H200, "emulate=True"),
    ],
    ids=["cpu", "meta", "emulate"],
)
def test_the_summary_says_why_nothing_was_measured(monkeypatch, cuda, config, device, why):
    cuda((9, 0))
    monkeypatch.setattr(layer_benchmark, "seconds", None)
    net = model().to(device) if device == "meta" else model()
    report = convert_to_float8(net, config, device=device)
    assert report.recipe.name == "tensorwise"
    assert len(report.converted) == 5
    lines = report.summary().splitlines()
    assert any(line.startswith("  recipe    auto -> tensorwise: ") for line in lines)
    assert f"  auto      chose tensorwise without measuring: {why}" in lines


def test_a_failure_is_one_warning_and_the_default(timed):
    timed({})

    def out_of_memory(device, run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate")

    layer_benchmark.seconds = out_of_memory
    with pytest.warns(UserWarning, match="without measuring") as warned:
        report = convert_to_float8(model(), AUTO)
    assert [str(w.message) for w in warned] == [
        "FP8Config(recipe='auto') runs 'tensorwise' without measuring: timing a layer of 16x32 "
        "failed (OutOfMemoryError: CUDA out of memory. Tried to). Name a recipe to skip measuring, "
        "or fewer tokens than 16"
    ]
    assert report.recipe.name == "tensorwise"
    assert len(report.converted) == 5
    assert "without measuring: timing a layer of 16x32 failed" in report.summary()


def test_where_no_layer_is_faster_all_stay_in_bf16_with_a_warning(timed):
    timed({WIDE: (50, fp8(60)), NARROW: (50, fp8(60)), SMALL: (41, fp8(63))})
    net = model()
    with pytest.warns(UserWarning, match=r"'wide.0': 64x32 is not faster.*name a recipe.*tokens"):
        report = convert_to_float8(net, AUTO)
    assert report.converted == report.producers == ()
    assert not any(isinstance(m, Float8Linear) for m in net.modules())
    assert "FP8: 0 of 5 linear layers, 0.0 % of the matmul FLOPs" in report.summary(net)


@pytest.mark.parametrize(
    ("dim", "communication", "recipe"),
    [(-1, "fp8", "tensorwise"), (1, "fp8", "blockwise"), (-1, "off", "blockwise")],
    ids=["features", "tokens", "features-in-16-bits"],
)
def test_a_parallel_style_that_gathers_features_takes_one_scale(timed, dim, communication, recipe):
    timed({shape: (100, fp8(60, 60, 50)) for shape in (WIDE, NARROW, SMALL)})
    net = model()
    check_style(net["wide"][0], Shard(dim))  # what the style does
    config = dataclasses.replace(AUTO, communication=communication)
    assert convert_to_float8(net, config).recipe.name == recipe


def test_nothing_is_measured_of_what_stays_anyway(timed):
    timer = timed({WIDE: (100, fp8(60)), SMALL: (10, fp8(5))})
    skip = FP8Config(tokens=16, skip=("narrow",))
    assert convert_to_float8(model(), skip).choice.recipe == "tensorwise"
    assert {tuple(run.layers[0].weight.shape) for run in timer.runs} == {WIDE, SMALL}
    with pytest.raises(ValueError, match="skip="):
        convert_to_float8(model(), FP8Config(skip=("**",)))


def test_output_layers_in_fp8_are_not_measured(timed):
    """Their loss is tensorwise, in chunks; all logits of the measurement would need gigabytes."""
    timer = timed({WIDE: (100, fp8(60)), NARROW: (10, fp8(5)), SMALL: (10, fp8(5))})
    net = model()
    net["head"] = nn.Linear(16, 4096).requires_grad_(False)
    report = convert_to_float8(net, AUTO)
    assert report.loss_heads == {"head": "fp8"}
    assert "head" in report.converted
    assert {tuple(run.layers[0].weight.shape) for run in timer.runs} == {WIDE, NARROW, SMALL}


def test_ranks_that_cannot_agree_do_not_measure(timed, rank_of_two):
    clock = timed({})
    report = convert_to_float8(model(), AUTO)
    assert report.recipe.name == "tensorwise"
    assert "the ranks of this process group cannot share" in report.choice.not_measured
    assert not clock.runs


def test_a_model_without_memory_is_measured_where_it_will_run(timed):
    timer = timed({WIDE: (100, fp8(60)), NARROW: (100, fp8(60)), SMALL: (41, fp8(63))})
    with torch.device("meta"):
        net = model()
        report = convert_to_float8(net, AUTO, device="cpu")
    assert [name for name, _ in report.skipped] == ["small"]
    assert {run.x.device.type for run in timer.runs} == {"cpu"}


LLAMA = llama_config(intermediate_size=176, vocab_size=128, attn_implementation="eager")
Q, KV, GATE, DOWN = (64, 64), (32, 64), (176, 64), (64, 176)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_layers_left_are_split_and_those_named_in_skip_are_not(timed, level):
    timed({s: (100, fp8(200 if s == GATE else 50)) for s in (Q, KV, GATE, DOWN)})
    torch.manual_seed(0)
    auto = AutoModelForCausalLM.from_config(LLAMA)
    named = copy.deepcopy(auto)
    left = convert_to_float8(auto, FP8Config(tokens=16, opt_level=level)).choice.left
    assert left
    skip = FP8Config(recipe="tensorwise", skip=("lm_head", *left), opt_level=level)
    convert_to_float8(named, skip)
    ids = torch.randint(1, 128, (2, 16))
    for net, config, cls in (
        (auto, FP8Config(tokens=16, opt_level=level), SplitWeight),
        (named, skip, nn.Parameter),
    ):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        assert convert_optimizer(optimizer, config, model=net).converted
        assert {type(net.get_submodule(name).weight) for name in left} == {cls}
        before = [p.detach().float().clone() for p in net.parameters()]
        with torch.autocast("cpu", torch.bfloat16):
            net(ids, labels=ids).loss.backward()
        optimizer.step()
        pairs = zip(before, net.parameters(), strict=True)
        assert all(p.isfinite().all() and not torch.equal(b, p.float()) for b, p in pairs)


QKV = (Q, KV, KV)


@pytest.mark.parametrize(
    ("kv", "together", "in_fp8"),
    [(30, 80, True), (30, 95, False), (30, 150, False), (5, 150, True)],
    ids=["faster", "slower-than-mixed", "slower-than-bf16", "each-is-faster"],
)
def test_small_layers_follow_those_that_read_the_same_input(timed, kv, together, in_fp8):
    """k and v take 20 us in BF16, q takes 50 in FP8; together, they take 140 in BF16."""
    rows = {s: (100, fp8(50)) for s in (Q, GATE, DOWN)}
    timed(rows | {KV: (20, fp8(kv)), QKV: (140, fp8(together))})
    report = convert_to_float8(AutoModelForCausalLM.from_config(LLAMA), AUTO)
    assert {name.rpartition(".")[2] for name in report.choice.left} == (
        set() if in_fp8 else {"k_proj", "v_proj"}
    )


class BehindLayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 64)
        self.query, self.key, self.value = (nn.Linear(64, n) for n in (64, 32, 32))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: AutoModelForCausalLM.from_config(LLAMA), {QKV, (GATE, GATE)}),
        (BehindLayerNorm, {QKV}),
    ],
    ids=["rms-norm", "layer-norm"],
)
def test_only_layers_that_one_norm_feeds_are_timed_together(timed, build, expected):
    clock = timed({s: (100, fp8(50)) for s in (Q, KV, GATE, DOWN)})
    net = build()
    convert_to_float8(net, AUTO)
    groups = {tuple(tuple(m.weight.shape) for m in run.layers) for run in clock.runs}
    assert {group for group in groups if len(group) > 1} == expected
    layer_times.cache_clear()
    before = len(clock.runs)
    convert_to_float8(net, AUTO)  # whose norms and layers are converted already
    assert len(clock.runs) == 2 * before


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_card_it_chooses_for_a_llama():
    """Native FP8 wins where GEMMs are large; only what it says must hold, whichever wins."""
    layers = {"up": nn.Linear(4096, 14336, False), "tiny": nn.Linear(16, 16)}
    net = nn.ModuleDict(layers).to("cuda", torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = convert_to_float8(net, FP8Config())
    assert report.choice.not_measured is None
    assert report.recipe.name == max(report.choice.speedups, key=report.choice.speedups.get)
    assert report.converted == ("up",)
    assert type(net["tiny"]) is nn.Linear
    assert "times as fast as BF16" in report.summary(net)
