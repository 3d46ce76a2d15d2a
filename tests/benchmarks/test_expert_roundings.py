"""Which casts bound a block of experts; see benchmarks/evidence/expert_roundings.py."""

import pytest

from benchmarks.evidence.expert_roundings import CASTS, FILE, RESULTS, rows
from benchmarks.rows import RESULTS as FOLDER
from benchmarks.rows import read_rows


def test_the_committed_rows_are_those_of_today_and_bound_a_block_below_26_db():
    measured = list(rows())
    for row, committed in zip(measured, read_rows(FOLDER / FILE), strict=True):
        assert row["left_out"] == committed["left_out"]
        for name in RESULTS:
            assert float(row[name]) == pytest.approx(float(committed[name]), abs=0.1)
    by_name = {row["left_out"]: [float(row[name]) for name in RESULTS] for row in measured}
    assert 22 < min(by_name["none"]) < max(by_name["none"]) < 24
    for cast in CASTS:  # whichever single one is left out
        assert min(by_name[cast]) < max(by_name[cast]) < 26
