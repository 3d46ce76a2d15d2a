"""What a compiled block launches, checks and moves is not more than what was recorded."""

import pytest

from benchmarks.evidence.compiled_block import row_of
from benchmarks.rows import RESULTS, read_rows

RECORDED = {
    (row["block"], row["variant"]): row for row in read_rows(RESULTS / "compiled_block.csv")
}


@pytest.mark.long
@pytest.mark.parametrize("variant", ["BF16", "tensorwise"])
def test_a_block_needs_no_more_than_recorded(variant):
    row, recorded = row_of("8B", variant), RECORDED["8B", variant]
    for name in ("opaque", "launches", "assertions"):
        assert row[name] <= int(recorded[name]), name
    assert float(row["gb"]) <= float(recorded["gb"])
    assert row["skip_reason"] == recorded["skip_reason"] == ""
