"""Pictures of the benchmarks' CSV files."""

import builtins

import pytest

from benchmarks import bench_linear
from benchmarks.bench_linear import write_shapes
from benchmarks.measurement import read_rows, write_rows
from benchmarks.plot import PICTURES, draw


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


def test_the_fastest_recipe_of_a_shape(tmp_path):
    rows = [
        {"linear": "q_proj", "M": 8, "K": 4, "N": 2, "variant": v, "mode": "eager", "median_ms": ms}
        for v, ms in (("bf16", 3.0), ("rowwise", 2.0), ("tensorwise", 2.5), ("torchao rowwise", 1))
    ]
    rows.append({"linear": "block", "M": 8, "variant": "rowwise", "median_ms": 1})
    write_rows(tmp_path / "linear.csv", bench_linear.COLUMNS, rows)
    write_shapes(tmp_path / "linear.csv")
    (found,) = read_rows(tmp_path / "linear_shapes.csv")
    assert (found["M"], found["K"], found["N"]) == ("8", "4", "2")
    assert (found["fastest"], found["speedup"]) == ("rowwise", "1.5")
    assert (found["bf16_ms"], found["mxfp8_ms"]) == ("3.0", "")
