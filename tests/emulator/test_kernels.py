"""Compiled kernels, launched as on a card and emulated, equal their references bit for bit."""

import os

import pytest
from triton import knobs

from tests.emulator.driver import emulated
from tests.emulator.families import corners, families
from tests.emulator.races import Races
from tests.emulator.schedule import Shuffled
from tests.internals import kernels_adamw as adamw
from tests.kernel_cases import played

pytestmark = pytest.mark.long

FAMILIES, WHOLE, CORNERS = families(few_rows=True), families(), corners()
SHARED = (
    *("cast block_1x128", "known scale", "transpose", "norm backward", "gate and up"),
    *("adamw with a tensorwise payload", "gradient", "tokens transposed"),
)
"""Families whose programs or warps work together in each way that there is."""


def watched():
    return [Races()]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SHARED])
def test_in_lockstep(family):
    with emulated(watch=watched) as emulation:
        FAMILIES[family]()
    assert emulation.launches


@pytest.mark.parametrize("name", CORNERS)
def test_every_value_and_choice(name, monkeypatch):
    monkeypatch.setattr(adamw, "CHUNK", 32)  # several chunks of small matrices
    with emulated(error_seed=1) as emulation:
        CORNERS[name]()
    assert emulation.launches


@pytest.mark.parametrize("shape", played.SHAPES, ids=str)
def test_played_calls_make_and_write_the_same_bytes(shape):
    with emulated():
        calls = [*played.calls(*shape, "cpu")]
        for call in calls if shape == played.SHAPES[1] else played.one_of_each(calls):
            played.check_played(call)


def test_triton_is_as_before_afterwards():
    """Or what is compiled next would be looked up among kernels without code."""
    before = knobs.cache.dir, dict(os.environ)
    with emulated():
        assert knobs.cache.dir != before[0]
    assert (knobs.cache.dir, dict(os.environ)) == before


def test_a_binary_is_assembled_and_loaded():
    with emulated(assembles=True) as emulation:
        FAMILIES["transpose"]()
    assert emulation.launches


@pytest.mark.parametrize("family", SHARED)
def test_in_a_random_order(family):
    with emulated(watch=watched, schedule=lambda: Shuffled(1)):
        FAMILIES[family]()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("family", FAMILIES)
def test_in_other_random_orders(family, seed):
    with emulated(watch=watched, schedule=lambda: Shuffled(seed), error_seed=seed):
        WHOLE[family]()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_on_blackwell(family):
    with emulated(capability=(10, 0), watch=watched):
        WHOLE[family]()


def test_errors_of_approximate_functions_change_no_promise():
    with emulated(error_seed=1):
        for family in ("norm", "swiglu backward", "adamw, 8 bits"):
            FAMILIES[family]()
