"""The picture of README, and what README says of it."""

import pytest

from benchmarks import overview
from benchmarks.measurement import ROOT, read_rows


def test_it_is_drawn_from_what_is_committed(tmp_path):
    pytest.importorskip("matplotlib")
    overview.draw(tmp_path / "overview.png")
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")


def test_readme_names_what_its_picture_shows():
    readme = (ROOT / "README.md").read_text()
    assert str(overview.PICTURE.relative_to(ROOT)) in readme
    assert overview.PICTURE.exists()
    peaks = overview.peaks(read_rows(overview.MEMORY))
    before, after = (sum(peaks[name].values()) for name in ("bf16-mixed", "O2"))
    assert f"from {before:.0f} to {after:.0f} GiB" in readme
    assert f"{after / before:.2f}x, {after:.1f} GiB" in readme


def test_both_runs_of_the_curves_are_of_one_length():
    rows = read_rows(overview.CURVES)
    for column, count in (("loss", 80), ("eval_loss", 5)):
        steps = [list(overview.curve(rows, name, column)) for name in overview.PRECISIONS]
        assert steps[0] == steps[1]
        assert len(steps[0]) == count


def test_losses_of_a_run_are_taken_over(tmp_path):
    for precision, loss in (("bf16-mixed", "2.0"), ("fp8-mixed", "2.5")):
        (tmp_path / precision).mkdir()
        text = f"step,loss,eval_loss,seconds\n0,,3.0,0.1\n1,{loss},,0.2\n"
        (tmp_path / precision / "losses.csv").write_text(text)
    overview.take(tmp_path, "abc", tmp_path / "curves.csv")
    rows = read_rows(tmp_path / "curves.csv")
    assert overview.curve(rows, "fp8-mixed", "loss") == {1: 2.5}
    assert overview.curve(rows, "bf16-mixed", "eval_loss") == {0: 3.0}
    assert {row["commit"] for row in rows} == {"abc"}
