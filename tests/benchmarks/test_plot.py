"""Pictures of the benchmarks' CSV files."""

import pytest

from benchmarks.measurement import write_rows
from benchmarks.plot import PICTURES, draw

MODES = ("eager", "compiled")


@pytest.mark.parametrize("name", PICTURES)
def test_a_csv_without_figures_is_drawn_all_the_same(tmp_path, name):
    """Every variant may have failed."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"{name}.csv"
    write_rows(path, ("variant", "median_ms", "note"), [{"variant": "x", "note": "failed"}])
    assert draw(path).read_bytes().startswith(b"\x89PNG")
