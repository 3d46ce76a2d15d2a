"""Pictures of the benchmarks' CSV files."""

import builtins

import pytest

from benchmarks import plot
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


def test_without_matplotlib_a_line_says_so(tmp_path, monkeypatch, capsys):
    original = builtins.__import__

    def missing(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert draw(tmp_path / "linear.csv") is None
    assert "torch-fp8[examples]" in capsys.readouterr().out


def test_a_csv_of_another_name_has_no_picture(tmp_path, capsys):
    """As ``--csv`` may ask for: the rows are there, and that is said."""
    path = tmp_path / "mine.csv"
    write_rows(path, ("a",), [{"a": 1}])
    assert plot.draw(path) is None
    assert "no picture of mine.csv" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
