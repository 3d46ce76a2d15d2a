"""The signal-to-noise ratios of casts and products that `benchmarks.evidence.numerics` records."""

import csv

import pytest

from benchmarks.evidence import numerics as bench
from benchmarks.rows import RESULTS
from torch_fp8.quantization.formats import GEMM_SQNR_DB
from torch_fp8.quantization.recipe import RECIPES, make_recipe

FINE = ("rowwise", "blockwise", "mxfp8")


@pytest.mark.parametrize("input_name", bench.INPUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_keeps_the_worst_row(recipe, input_name):
    for row in bench.measure(recipe, input_name):
        if row["operand"] == "fprop":
            continue
        spec = getattr(make_recipe(recipe), row["operand"])
        if input_name == "gaussian" or recipe in FINE:
            assert row["worst_row_db"] >= spec.format.cast_sqnr_db - 2, row
            assert row["flushed"] <= 5e-4, row
        if input_name == "gaussian":
            assert row["sqnr_db"] == pytest.approx(spec.format.cast_sqnr_db, abs=0.5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recorded_figures_are_those_of_this_code(recipe):
    """One scale for a whole tensor loses rows: recorded, not hidden, in benchmarks/results."""
    with (RESULTS / "numerics.csv").open() as file:
        recorded = {(r["recipe"], r["input"], r["operand"]): r for r in csv.DictReader(file)}
    for input_name in bench.INPUTS:
        for row in bench.measure(recipe, input_name):
            was = recorded[recipe, input_name, row["operand"]]
            for column, tolerance in (("sqnr_db", 0.2), ("worst_row_db", 0.5), ("flushed", 2e-3)):
                assert row[column] == pytest.approx(float(was[column]), abs=tolerance), row


@pytest.mark.parametrize("input_name", ["row_spread", "outlier"])
@pytest.mark.parametrize("recipe_name", ["rowwise", "blockwise", "mxfp8"])
def test_fine_scales_keep_the_worst_row_of_unkind_inputs(recipe_name, input_name):
    fprop = next(r for r in bench.measure(recipe_name, input_name) if r["operand"] == "fprop")
    assert fprop["worst_row_db"] >= GEMM_SQNR_DB["e4m3", "e4m3"] - 2
