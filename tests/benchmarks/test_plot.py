"""Pictures of the benchmarks' CSV files."""

import builtins

import pytest

from benchmarks import bench_linear, plot
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


def drawn(monkeypatch, path):
    """(panel, its axes) of a picture."""
    found = []
    original = plot.Panel.__init__

    def note(panel, title, drawing, *rest, **options):
        def draw_and_note(axis, rows):
            drawing(axis, rows)
            found.append((panel, axis))

        original(panel, title, draw_and_note, *rest, **options)

    monkeypatch.setattr(plot.Panel, "__init__", note)
    draw(path)
    return found


@pytest.fixture
def every_linear(tmp_path):
    """A row of each variant of the linears, none like another."""
    rows = [
        {"linear": linear, "M": m, "variant": v, "mode": mode, "speedup": 1 + 0.02 * i + m / 1e6}
        for linear in ("together", "chain")
        for m in (1024, 8192)
        for i, (v, mode) in enumerate((v, m) for v in bench_linear.VARIANTS for m in MODES)
    ]
    write_rows(tmp_path / "linear.csv", bench_linear.COLUMNS, rows)
    return tmp_path / "linear.csv"


@pytest.mark.long
def test_a_panel_has_eight_lines_that_can_be_told_apart(monkeypatch, every_linear):
    pytest.importorskip("matplotlib")
    panels = drawn(monkeypatch, every_linear)
    names = set()
    for _, axis in panels:
        series = axis.get_lines()
        assert 2 <= len(series) <= 8
        assert len({(line.get_color(), line.get_marker()) for line in series}) == len(series)
        names |= {line.get_label() for line in series}
    assert len(names) == len(bench_linear.VARIANTS) * len(MODES)
    assert len({panel.title for panel, _ in panels}) == len(panels)


def test_a_csv_of_another_name_has_no_picture(tmp_path, capsys):
    """As ``--csv`` may ask for: the rows are there, and that is said."""
    path = tmp_path / "mine.csv"
    write_rows(path, ("a",), [{"a": 1}])
    assert plot.draw(path) is None
    assert "no picture of mine.csv" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
