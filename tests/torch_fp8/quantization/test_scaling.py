import math

import pytest
import torch

from tests.internals import (
    E4M3,
    E5M2,
    MIN_SCALE,
    delayed_scale,
    past_amax,
    push_amax,
    round_up_to_power_of_two,
    scale_from_amax,
    shared_amaxes,
    tensor_amax,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_is_exact_and_sees_nan(dtype):
    x = torch.randn(33, 17).to(dtype)
    assert tensor_amax(x).dtype == torch.float32
    assert tensor_amax(x) == x.float().abs().max()
    x[3, 4] = math.nan
    assert tensor_amax(x).isnan()
    x[3, 4] = -math.inf
    assert tensor_amax(x) == math.inf
    assert tensor_amax(x[:0]) == 0


def test_the_largest_element_lands_on_the_largest_number():
    amax = torch.tensor([1.0, 3.7, 1e-20, 1e20])
    assert torch.equal(scale_from_amax(amax, E4M3), amax / 448)
    assert torch.equal(scale_from_amax(amax, E5M2), amax / 57344)


def test_edges_of_the_scale():
    amax = torch.tensor([0.0, 1e-44, math.inf, math.nan])
    for power_of_two in (False, True):
        scale = scale_from_amax(amax, E4M3, power_of_two)
        assert scale[0] == 1
        assert scale[1] == MIN_SCALE
        assert scale[2] == math.inf
        assert scale[3].isnan()


def test_rounding_up_to_powers_of_two_is_exact():
    x = torch.tensor([1.0, 1.0000001, 0.75, 3.0, 2.0**-100, 2.0**100 * 1.5])
    expected = torch.tensor([1.0, 2.0, 1.0, 4.0, 2.0**-100, 2.0**101])
    assert torch.equal(round_up_to_power_of_two(x), expected)
    random = torch.rand(1000).exp() * 10.0 ** torch.randint(-30, 30, (1000,))
    up = round_up_to_power_of_two(random)
    assert torch.equal(up.to(torch.float8_e8m0fnu).float(), up)
    assert ((up >= random) & (up < 2 * random)).all()


def test_delayed_scale_follows_the_history():
    history = torch.tensor([2.0, 8.0, 4.0, 0.0])
    largest, newest = (past_amax(history, algorithm) for algorithm in ("max", "most_recent"))
    assert delayed_scale(largest, E4M3, 0) == torch.tensor(8.0) / 448
    assert delayed_scale(newest, E4M3, 0) == torch.tensor(2.0) / 448
    assert delayed_scale(largest, E4M3, 3) == torch.tensor(64.0) / 448
    both = past_amax(torch.stack([history, 2 * history]), "max")
    assert delayed_scale(both, E5M2, 0).tolist() == (torch.tensor([8.0, 16.0]) / 57344).tolist()


def test_history_shifts_and_survives_a_bad_batch():
    history = torch.zeros(3)
    for amax in (1.0, 2.0, math.inf, math.nan, 4.0):
        history = push_amax(history, torch.tensor(amax), "max")
    assert history.tolist() == [4.0, 2.0, 2.0]


def _pushed(amaxes, algorithm="max", length=4):
    history = torch.zeros(length)
    for amax in amaxes:
        history = push_amax(history, torch.tensor(amax), algorithm)
    return history


def test_what_was_not_cast_leaves_its_history_as_it_is():
    histories = torch.tensor([[2.0, 8.0], [0.0, 0.0], [4.0, 0.0]])
    pushed = push_amax(histories, torch.tensor([0.0, 0.0, 5.0]), "max")
    assert pushed.tolist() == [[2.0, 8.0], [0.0, 0.0], [5.0, 4.0]]


def test_one_finite_outlier_does_not_move_the_scale():
    """It would leave nothing but zeros of what is usual, until the history has forgotten it."""
    history = _pushed([2.0, 3.0, 1e38, 1.0])
    assert history.abs().tolist() == [1.0, 3.0, 3.0, 2.0]
    assert past_amax(history, "max") == 3
    # The next one is a lone one again.
    assert _pushed([2.0, 3.0, 1e38, 1.0, 1e38, math.inf]).abs().amax() == 3


def test_what_is_as_large_again_is_no_outlier():
    assert _pushed([2.0, 1e6, 1e6]).tolist() == [1e6, -2.0, 2.0, 0.0]
    assert _pushed([2.0, 1e6, math.nan, 1e6]).tolist() == [1e6, -2.0, -2.0, 2.0]
    assert _pushed([1e38])[0] == torch.tensor(1e38)  # nothing to compare it with
    assert _pushed([2.0, 8192.0])[0] == 8192.0  # the bound itself
    assert _pushed([2.0, 1e38], "most_recent")[0] == torch.tensor(1e38)  # for one step alone


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_ordinary_amaxes_are_recorded_as_transformer_engine_does(algorithm):
    """Up to 4,096 times the largest so far, in any order; but a zero, which says that nothing was
    cast or nothing but zeros, is left out.
    """
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.zeros(16), torch.zeros(16)
    for step in range(200):
        amax = torch.rand((), generator=generator) * 2.0 ** (step % 23 - 11)
        amax = amax if step % 7 else torch.zeros(())
        if theirs.amax() > 0:
            amax = amax.clamp(max=4096 * theirs.amax())
        ours = push_amax(ours, amax, algorithm)
        theirs = torch.cat([amax[None], theirs[:-1]]) if amax else theirs
        assert torch.equal(ours, theirs)


def test_layers_without_an_amax_share_that_of_the_layer_before_them():
    inputs = torch.tensor([0.0, 3.0, 0.0, 0.0, 2.0, 0.0, 1.0])
    gradients = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    assert shared_amaxes(inputs, gradients).tolist() == [0, 3, 3, 0, 2, 2, 1]
