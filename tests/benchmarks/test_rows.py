import re

import pytest

from benchmarks import rows
from benchmarks.overview import PICTURE, saving
from benchmarks.rows import CODE, EARLIER, RESULTS, ROOT, append_rows, read_rows, write_rows

SOURCES = sorted(
    [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks/evidence").glob("*.py")]
)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_every_committed_row_says_which_code_made_it(path):
    committed = read_rows(path)
    assert committed
    for row in committed:
        assert re.fullmatch(f"({EARLIER})?[0-9a-f]{{12}}", row[CODE]), row


def test_the_picture_shows_the_rows():
    assert f"peak memory, {saving()}" in (ROOT / "README.md").read_text()
    assert saving().encode() in PICTURE.read_bytes()


def test_rows_keep_the_code_that_made_them(tmp_path):
    path = tmp_path / "made" / "rows.csv"
    write_rows(path, ("a", "b"), [{"a": 1, "b": 2, "unknown": 3}, {"a": 3, CODE: "0" * 12}])
    append_rows(path, ("a", "b"), [{"a": 5, "b": 6}])
    own = rows.code()
    assert [list(row.values()) for row in read_rows(path)] == [
        ["1", "2", own],
        ["3", "", "0" * 12],
        ["5", "6", own],
    ]
    assert [p.name for p in path.parent.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_benchmark_writes_over_a_file_of_the_repository_unasked(path):
    text = path.read_text()
    defaults = re.findall(r"default=([^)]*)", text)
    assert not any(re.search(r"RESULTS|benchmarks/results|docs", given) for given in defaults)
    if path.name != "rows.py":
        assert not re.search(r"csv\.(Dict)?[wW]riter", text)
    for given in re.findall(r"(?:write_rows|append_rows)\(([^,]*),", text):
        assert not re.search(r"RESULTS|CURVES|EXPERTS", given.replace("with_name", "")) or (
            ".with_name(" in given
        )
