"""The table of docs/smooth_swiglu.md: the square root loses nothing, its alternatives do."""

from benchmarks.evidence import smooth_factors
from benchmarks.rows import RESULTS, ROOT, read_rows


def test_the_page_shows_the_rows():
    page = (ROOT / "docs/smooth_swiglu.md").read_text()
    rows = read_rows(RESULTS / "smooth_factors.csv")
    for tokens, name in (("2048", "2,048 tokens"), ("1", "one token")):
        found = [row["sqnr_db"] for row in rows if row["tokens"] == tokens]
        assert f"| {name} | {' | '.join(found)} |" in page


def test_only_the_root_keeps_e4m3s_floor():
    root, none = (smooth_factors.left(256, share, seeds=1) for share in (0.5, 0.0))
    assert root > 28.0
    assert none < root - 6
