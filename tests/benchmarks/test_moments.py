"""The second moment's format was chosen by measurement: what is recorded, and a part measured."""

import csv

import pytest
import torch

from benchmarks.evidence import moments as bench
from benchmarks.rows import RESULTS
from torch_fp8.quantization.block_scaled import decode, encode
from torch_fp8.quantization.formats import MOMENT2


def _recorded():
    with (RESULTS / "moments.csv").open() as file:
        rows = list(csv.DictReader(file))
    keys = "format", "group", "rounding", "scenario", "elements"
    return {tuple(row[k] for k in keys): row for row in rows}


def _product(rows, scenario, elements):
    format_name, group, rounding = bench.PRODUCT
    return rows[format_name, str(group), rounding, scenario, elements]


@pytest.mark.parametrize("elements", ["changed", "unchanged"])
@pytest.mark.parametrize("scenario", bench.SCENARIOS)
def test_the_second_moment_follows_a_change_of_scale(scenario, elements):
    row = _product(_recorded(), scenario, elements)
    assert abs(float(row["median"]) - 1) <= bench.BAND
    assert float(row["zero"]) == 0


@pytest.mark.long
def test_the_recorded_figures_are_those_of_this_code():
    recorded = _recorded()
    for row in bench.measure_following(*bench.PRODUCT, scenarios=("up", "down")):
        was = _product(recorded, row["scenario"], row["elements"])
        assert abs(row["median"] - 1) <= bench.BAND
        for column in ("median", "p05", "p95"):  # of 1,024 and 3,072 elements
            assert row[column] == pytest.approx(float(was[column]), abs=0.06)
        assert row["zero"] == 0


def test_to_nearest_the_second_moment_stands_still():
    recorded = _recorded()
    for format_name in ("ue5m3", "e5m2", "sqrt_e4m3"):
        down = recorded[format_name, "32", "nearest", "down", "changed"]
        assert float(down["median"]) > 5


@pytest.mark.parametrize("group", ["32", "128"])
def test_only_unsigned_formats_and_a_fitted_one_store_no_zero(group):
    """And of these the chosen one is nearest, where a group, of 32 as it has them, spreads."""
    recorded = _recorded()
    zero, spread = {}, {}
    for format_name in bench.FORMATS:
        row = recorded[format_name, group, "stochastic", "rounded_once", "all"]
        zero[format_name] = float(row["zero"])
        spread[format_name] = float(row["p95"]) - float(row["p05"])
    assert zero["tapered"] == zero["ue5m3"] == zero["ue4m4"] == zero["fitted_e4m3"] == 0
    assert min(zero[f] for f in ("e5m2", "sqrt_e4m3", "expanded_e4m3")) > 1e-4
    if group == "32":
        assert spread["tapered"] == min(spread.values())


@pytest.mark.parametrize("format_name", bench.FORMATS)
def test_the_formats_of_the_comparison_round_fairly(format_name):
    """Nearest to a neighbour, stochastic without bias: so that nobody loses by our doing."""
    v = torch.rand(64, 32).exp()
    nearest = bench.stored(v, format_name, 32, "nearest")
    assert ((nearest / v).sqrt() - 1).abs().max() < 2.0**-4
    mean = torch.stack([bench.stored(v, format_name, 32, "stochastic") for _ in range(400)]).mean(0)
    assert (mean / v - 1).abs().mean() < 0.006  # 2^-3 / sqrt(12 * 400) of noise
    assert (mean / v).mean() == pytest.approx(1, abs=5e-4)


@pytest.mark.parametrize("elements", ["changed", "unchanged"])
@pytest.mark.parametrize("scenario", ["up", "down"])
def test_one_more_mantissa_bit_makes_the_random_walk_shorter(scenario, elements):
    """By half of its variance."""
    rows, spread = _recorded(), {}
    for format_name in ("tapered", "ue5m3"):
        row = rows[format_name, "32", "stochastic", scenario, elements]
        spread[format_name] = float(row["p95"]) - float(row["p05"])
    assert spread["tapered"] < 0.75 * spread["ue5m3"]


def test_the_comparisons_own_rounding_is_the_packages():
    v = (4 * torch.randn(64, 32)).exp()
    v[:, 3] = 1e-30
    assert torch.equal(bench.tapered(v, None), decode(encode(v, MOMENT2), MOMENT2))
