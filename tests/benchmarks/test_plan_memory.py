"""The table of docs/choose.md is that of the committed rows."""

from benchmarks.evidence.plan_memory import DOCS, FILE, MARK, RUNS, table
from benchmarks.rows import RESULTS, read_rows
from torch_fp8_tools.plan.setup import LEVELS


def test_the_page_shows_the_committed_rows():
    shown = DOCS.read_text().partition(MARK)[2].partition(MARK)[0]
    assert shown.strip() == table(read_rows(RESULTS / FILE)).strip()


def test_each_model_has_a_row_for_each_level():
    rows = read_rows(RESULTS / FILE)
    models = {(row["model"], int(row["gpus"])) for row in rows}
    assert models <= set(RUNS)
    assert len(rows) == len(LEVELS) * len(models)


def test_peaks_that_do_not_fit_are_in_brackets():
    row = {"model": "m", "billion_parameters": 1, "gpus": 8, "peak_gib": 90, "fits_80_gib": False}
    rows = [{**row, "level": level} for level in LEVELS]
    assert table(rows).count("(90.0)") == len(LEVELS)
