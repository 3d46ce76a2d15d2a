"""The 4-bit scheme of the experiments, and that they measure what they say."""

import pytest
import torch

from benchmarks.evidence import moment_bits
from benchmarks.evidence.moment_bits import GROUP, LARGEST, paired, ratio, simulate, thresholds
from torch_fp8.ops import adamw


def test_stored_moments_lie_on_a_grid_of_fifteen():
    generator = torch.Generator().manual_seed(0)
    m, v = torch.randn(8, 64, generator=generator), torch.rand(8, 64, generator=generator)
    index = torch.arange(512).view(8, 64)
    stored = ratio(m, v, thresholds(index, 3))
    codes = stored / v.sqrt()
    codes = codes.view(8, -1, GROUP) / codes.view(8, -1, GROUP).abs().amax(-1, keepdim=True)
    assert all(
        len((1e4 * group).round().unique()) <= 2 * LARGEST + 1 for group in codes.flatten(0, 1)
    )
    assert (stored - m).abs().max() <= 1.07 * m.abs().max() / LARGEST * (v / v.min()).sqrt().max()


def test_rounding_is_right_on_average_over_the_steps():
    m, v = torch.full((1, GROUP), 0.123), torch.ones(1, GROUP)
    m[0, 0] = 1.0  # what the scale is of
    index = torch.arange(GROUP)[None]
    mean = torch.stack([ratio(m, v, thresholds(index, step)) for step in range(610)]).mean(0)
    assert torch.allclose(mean[0, 1:], m[0, 1:], atol=1e-3)
    again = thresholds(index, 4096 + 7) - thresholds(index, 7)
    assert again.unique().numel() > GROUP // 2, "perturbed, not moved"


def test_a_second_moment_of_zero_has_no_first_one():
    assert not ratio(torch.ones(1, GROUP), torch.zeros(1, GROUP), torch.zeros(1, GROUP)).any()


def test_the_simulation_ranks_eight_bits_before_four():
    eight, four, linear = (
        simulate(moment_bits.SCHEMES[name], 0, 0.5, 0.0, 0.95, 60)
        for name in ("8 bits", "ratio, 16, sequence", "linear, 32, random")
    )
    assert eight[0] < four[0] < linear[0]
    assert eight[1] > four[1] > linear[1]


@pytest.mark.long
def test_training_keeps_four_bits_where_it_says_so():
    step_part = adamw._step_part
    losses = {
        scheme: moment_bits.small_model_loss("llama, lr x 1", scheme, 0)
        for scheme in ("8 bits", "ratio, 16, sequence")
    }
    assert losses["8 bits"] != losses["ratio, 16, sequence"]
    assert losses["ratio, 16, sequence"] == pytest.approx(losses["8 bits"], rel=0.1)
    assert adamw._step_part is step_part


def test_differences_are_taken_seed_by_seed():
    losses = {("8 bits", 0): 1.0, ("8 bits", 1): 2.0, ("four", 0): 1.1, ("four", 1): 2.2}
    rows = [
        {"case": "c", "scheme": scheme, "seed": str(seed), "loss": str(loss)}
        for (scheme, seed), loss in losses.items()
    ]
    mean, error = paired(rows, "c", "four")
    assert mean == pytest.approx(0.1)
    assert error == pytest.approx(0.0, abs=1e-9)
