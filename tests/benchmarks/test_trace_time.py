"""What Dynamo traces of a block: one graph, and functions that are the same on every machine."""

import pytest

from benchmarks.measurement import RESULTS, read_rows
from benchmarks.trace_time import BACKENDS, RECIPES, Traced, rows

FUNCTIONS = {"tensorwise": 73, "delayed": 78, "rowwise": 73, "blockwise": 73}


@pytest.mark.long
@pytest.mark.parametrize("recipe", FUNCTIONS)
def test_one_graph_and_no_more_functions_than_today(recipe):
    (row,) = rows("eager", (recipe,), 1)
    assert row["graphs"] == 1
    assert Traced("BF16").functions() < row["functions"] <= FUNCTIONS[recipe]


def test_results_hold_both_backends_and_each_recipe():
    found = {(row["backend"], row["recipe"]): row for row in read_rows(RESULTS / "trace_time.csv")}
    assert set(found) == {(backend, recipe) for backend in BACKENDS for recipe in RECIPES}
    assert {row["graphs"] for row in found.values()} == {"1"}
