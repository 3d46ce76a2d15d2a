import dataclasses

import pytest

from tests.internals import LEVELS, make_setup, standing_bytes
from tests.torch_fp8_tools.plan.layouts_for_tests import (
    LAYOUTS,
    WIDE,
    config_of,
    levels_of,
    plan_beside,
)
from torch_fp8 import plan

pytestmark = pytest.mark.long
OPTIONS = {"sequence": 32, "recipe": "tensorwise"}


OTHERS = [layout for layout in LAYOUTS if layout not in ("llama", "qwen3")]


@pytest.fixture(
    scope="module",
    params=[
        (2, ["qwen3"]),
        (4, ["llama"]),
        *(pytest.param((number, OTHERS), marks=pytest.mark.slow) for number in (2, 4)),
    ],
    ids=["2", "4", "2-others", "4-others"],
)
def ranks(request, run_ranks):
    """The number of ranks, the layouts that they share, and what rank 0 of them counted."""
    number, layouts = request.param
    return number, layouts, run_ranks("plan_cases.py", number, *layouts)[0]


@pytest.mark.parametrize("level", LEVELS)
def test_predicted_shards_are_those_of_a_rank(ranks, level):
    number, layouts, counted = ranks
    for layout in layouts:
        setup = make_setup(config_of(layout), gpus=number, **OPTIONS)
        predicted = dataclasses.asdict(standing_bytes(setup, level))
        assert predicted == counted[f"{layout} {level}"]["memory"], layout


def test_predicted_wire_of_fsdp_is_what_a_rank_sends(ranks):
    number, layouts, counted = ranks
    layout = layouts[0]
    levels = ("bf16-mixed", *(("O1", "O3") if number == 2 else ("O2",)))
    planned = plan(config_of(layout), gpus=number, levels=levels, **OPTIONS)
    predicted = {level: planned.levels[level].wire for level in levels}
    assert predicted == {level: counted[f"{layout} {level}"]["wire"] for level in levels}
    assert predicted[levels[-1]] < 0.75 * predicted["bf16-mixed"]


@pytest.fixture(scope="module")
def steps():
    """What steps of the wide layout take, which is the same for any number of replicas."""
    return {}


def test_predicted_wire_of_replicas_is_what_a_rank_sends(ranks, steps):
    """Messages are padded, and gradients of norms go as BF16: 1 % for 1.2 million weights."""
    number, _, counted = ranks
    ways = [("replicas", {"data": number})] + [("halves", {"fsdp": 2})] * (number == 4)
    for name, degrees in ways:
        options = {**OPTIONS, **degrees, "levels": levels_of(name, number)}
        planned = plan_beside(steps.setdefault(name, {}), config_of(WIDE), gpus=number, **options)
        for level, of_level in planned.levels.items():
            sent = counted[f"{name} {level}"]["wire"]
            assert of_level.wire == pytest.approx(sent, rel=0.01), (name, level)
