"""Pictures of the benchmarks' CSV files."""

import builtins

import pytest

from benchmarks import bench_linear, plot
from benchmarks.bench_linear import write_shapes
from benchmarks.measurement import RESULTS, read_rows, write_rows
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


def test_axes_have_names_and_units_and_labels_are_words(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("roofline", "memory_counted"):
        (tmp_path / f"{name}.csv").write_bytes((RESULTS / f"{name}.csv").read_bytes())
        for _, axis in drawn(monkeypatch, tmp_path / f"{name}.csv"):
            assert axis.get_xlabel() in ("tokens (rows M of the input)", "memory at the peak (GiB)")
            shown = [text.get_text() for text in axis.get_yticklabels()]
            shown += [str(line.get_label()) for line in axis.get_lines()]
            assert not any(word in text for text in shown for word in ("False", "True", "mixed"))
    ticks = [text for text in shown if "sequence" in text]
    assert "FP8, level O2, checkpointed, 1 sequence" in ticks


def test_lines_that_lie_on_one_another_are_one():
    line = [(1.0, 1.0), (2.0, 1.5)]
    same, other = [(1.0, 1.004), (2.0, 1.5)], [(1.0, 1.0), (2.0, 1.6)]
    assert plot._merged({"a": line, "b": other, "c": same}) == {"a\n= c": line, "b": other}


def test_pictures_that_are_kept_are_of_the_csv_beside_them():
    """Drawn by python -m benchmarks.plot, or by the benchmark of that name itself."""
    for picture in RESULTS.glob("*.png"):
        if picture.stem not in PICTURES:
            (own,) = RESULTS.parent.glob(f"**/{picture.stem}.py")
            assert "savefig" in own.read_text() or "draw(" in own.read_text()
        assert picture.with_suffix(".csv").exists()


def test_a_csv_of_another_name_has_no_picture(tmp_path, capsys):
    """As ``--csv`` may ask for: the rows are there, and that is said."""
    path = tmp_path / "mine.csv"
    write_rows(path, ("a",), [{"a": 1}])
    assert plot.draw(path) is None
    assert "no picture of mine.csv" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
