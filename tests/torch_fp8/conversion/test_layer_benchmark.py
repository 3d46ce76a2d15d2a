"""The layers that are timed, on the CPU with a timer that is given; and a card's own, on one."""

import contextlib

import pytest
import torch
from torch import nn

from tests.internals import LayerShape, layer_benchmark, layer_times, make_recipe
from torch_fp8 import Float8Linear
from torch_fp8.ops import quantize, scaled_mm

CPU = torch.device("cpu")
SHAPE = LayerShape(48, 32, True, torch.bfloat16)
NAMES = ("tensorwise", "rowwise", "blockwise")
RECIPES = tuple(make_recipe(name) for name in NAMES)


@pytest.fixture(autouse=True)
def _nothing_timed_before():
    layer_times.cache_clear()
    yield
    layer_times.cache_clear()


@pytest.fixture
def timer(monkeypatch):
    """``timer(seconds)``: the passes that are timed from then on, and run once each."""

    def install(seconds):
        runs = []

        def timed(device, run):
            runs.append(run)
            run()
            return seconds(run)

        monkeypatch.setattr(layer_benchmark, "seconds", timed)
        return runs

    return install


def name(run):
    return None if run.recipe is None else run.recipe.name


def test_the_clock_runs_when_all_is_launched(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def synchronize(self):
            done.append("wait")

        def elapsed_time(self, end):
            return 2.5  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("sleep"))
    taken = layer_benchmark.seconds(torch.device("cuda"), lambda: done.append("run"))
    assert taken == 2.5e-3
    assert done == ["run", "sleep", "event", "run", "event", "wait"]


def test_the_median_of_each_recipe_and_of_none(timer):
    samples = {None: iter([9, 5, 1, 4, 2, 3]), "tensorwise": iter([0, 10, 30, 20, 20, 20])}
    runs = timer(lambda run: next(samples[name(run)]))
    times = layer_times(CPU, (SHAPE,), 16, RECIPES[:1])
    assert times == (3, {"tensorwise": 20})  # the first of each warms up
    assert [name(run) for run in runs] == [None, "tensorwise"] * 6


def test_passes_are_those_of_training(timer):
    seen = {}

    def look(run):
        seen[name(run)] = run
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
        return 1.0

    timer(look)
    with (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.float16),
        torch.device("meta"),
        torch._subclasses.FakeTensorMode(),
    ):
        layer_times(CPU, (SHAPE,), 16, RECIPES)
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert type(torch.empty(1)) is torch._subclasses.FakeTensor
    assert set(seen) == {None, "tensorwise", "rowwise", "blockwise"}
    for recipe, run in seen.items():
        assert type(run.layers[0]) is (nn.Linear if recipe is None else Float8Linear)
        assert run.layers[0].training
        assert type(run.x) is torch.Tensor
        assert (run.x.shape, run.grad_outputs[0].shape) == ((16, 32), (16, 48))
        assert run.x.grad is None
        for parameter in run.layers[0].parameters():
            assert parameter.requires_grad
            assert parameter.dtype == torch.bfloat16
            assert parameter.grad is None
            assert parameter.isfinite().all()
        # One weight and one input for all: no more memory than one layer takes.
        assert run.layers[0].weight is seen[None].layers[0].weight
        assert run.x is seen[None].x
    assert len(list(seen[None].layers[0].parameters())) == 2


@pytest.fixture
def weight_casts(monkeypatch):
    """Each cast of a weight since the last clear: granularity, by column, no read for its scale."""
    casts = []
    original = quantize.quantize_2d

    def noted(x, options):
        if x.shape == (SHAPE.out_features, SHAPE.in_features):
            given = options.scale is not None or options.amax is not None
            casts.append((options.granularity, options.columnwise, given))
        return original(x, options)

    noted.reference = original.reference
    monkeypatch.setattr(quantize, "quantize_2d", noted)
    return casts


# Of a pass, by row in forward and by column in backward; tensorwise that takes forward's scale.
CAST = {name: [(RECIPES[i].weight.granularity, False, False)] for i, name in enumerate(NAMES)}
TRANSPOSED = {
    name: [(RECIPES[i].weight.granularity, True, name == "tensorwise")]
    for i, name in enumerate(NAMES)
}


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (None, {name: CAST[name] + TRANSPOSED[name] for name in NAMES}),
        (
            False,
            {name: CAST[name] + TRANSPOSED[name] for name in NAMES}
            | {"tensorwise": [("tensorwise", False, True), ("tensorwise", True, True)]},
        ),
        (True, {"tensorwise": [], "rowwise": TRANSPOSED["rowwise"], "blockwise": []}),
    ],
    ids=["nothing", "amax", "payload"],
)
def test_a_weight_is_cast_as_it_is_between_two_steps(monkeypatch, weight_casts, kept, expected):
    seen = []

    def timed(device, run):
        run()
        weight_casts.clear()
        run()
        seen.append((name(run), list(weight_casts)))
        return 1.0

    monkeypatch.setattr(layer_benchmark, "seconds", timed)
    layer_times(CPU, (SHAPE,), 24, RECIPES, kept)
    assert [of for of, _ in seen] == [None, *NAMES] * 6
    for of, casts in seen:
        assert casts == ([] if of is None else expected[of]), of


@pytest.mark.parametrize(("recipe", "products"), [("tensorwise", 4), ("rowwise", 6)])
def test_layers_with_one_input_share_its_cast_and_backward_products(monkeypatch, recipe, products):
    shapes = tuple(LayerShape(n, 32, False, torch.bfloat16) for n in (64, 16))
    cast, multiply, seen = quantize.quantize_2d, scaled_mm._multiply, []

    def noted_cast(x, options):
        seen.append(tuple(x.shape))
        return cast(x, options)

    def noted_product(*args, **options):
        seen.append("product")
        return multiply(*args, **options)

    def timed(device, run):
        seen.clear()
        run()
        if run.recipe is not None:
            assert (seen.count((24, 32)), seen.count("product")) == (1, products)
        return 1.0

    noted_cast.reference = cast.reference
    monkeypatch.setattr(quantize, "quantize_2d", noted_cast)
    monkeypatch.setattr(scaled_mm, "_multiply", noted_product)
    monkeypatch.setattr(layer_benchmark, "seconds", timed)
    layer_times(CPU, shapes, 24, (make_recipe(recipe),))


@pytest.mark.gpu
@pytest.mark.alone
def test_a_card_times_its_layers():
    device = torch.device("cuda")
    shape, tokens = LayerShape(4096, 4096, True, torch.bfloat16), 8192
    layer_times(device, (SHAPE,), 16, RECIPES[:2])  # cuBLAS keeps workspaces from now on
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = layer_times(device, (shape,), tokens, RECIPES[:2])
    assert 0 < times.plain < 1
    assert all(0 < t < 1 for t in times.fp8.values())
    assert torch.cuda.memory_allocated() == before
    # Operands and gradients in BF16, and payloads of half of that in two layouts; workspaces.
    elements = shape.out_features * shape.in_features + tokens * sum(shape[:2])
    assert torch.cuda.max_memory_allocated() - before < 3 * 2 * elements + 2**27
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
