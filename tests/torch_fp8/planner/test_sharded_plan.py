"""What a plan predicts for a shard is what a rank of FSDP2 holds."""

import dataclasses

import pytest

from tests.torch_fp8.planner.layouts_for_tests import LAYOUTS, config_of
from torch_fp8.planner.counts import standing_bytes
from torch_fp8.planner.setup import LEVELS, make_setup

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, run_ranks):
    """The number of ranks, and what rank 0 of them counted."""
    return request.param, run_ranks("plan_cases.py", request.param)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", LEVELS)
def test_predicted_shards_are_those_of_a_rank(ranks, layout, level):
    number, counted = ranks
    setup = make_setup(config_of(layout), gpus=number, sequence=32, recipe="tensorwise")
    predicted = standing_bytes(setup, "policy", level)
    assert dataclasses.asdict(predicted) == counted[f"{layout} {level}"]
