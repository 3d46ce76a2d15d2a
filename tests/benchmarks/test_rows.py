"""Rows of benchmarks: where they go, and which code they say has made them."""

import re
import subprocess

import pytest

from benchmarks import rows
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


def test_the_digest_of_a_commit_is_that_of_its_files(tmp_path, monkeypatch):
    """And of files that are not committed; what is no code is left out."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    source = tmp_path / "torch_fp8" / "inner" / "one.py"
    source.parent.mkdir(parents=True)
    source.write_text("ONE = 1\n")
    for part in rows.PARTS[1:]:
        (tmp_path / part).mkdir()
        (tmp_path / part / "two.py").write_text(f"{part} = 2\n")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    first = rows.code()
    assert rows.code_of("HEAD") == first
    (tmp_path / "benchmarks" / "rows.csv").write_text("a\n1\n")
    assert rows.code() == first
    source.write_text("ONE = 2\n")
    changed = rows.code()
    assert changed != first == rows.code_of("HEAD")
    subprocess.run([*git, "commit", "-q", "-a", "-m", "second"], check=True)
    assert rows.commits_of({first, changed, "0" * 12}).keys() == {first, changed}


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
    """All rows are written by `write_rows`, by default to a place of their own."""
    text = path.read_text()
    defaults = re.findall(r"default=([^)]*)", text)
    assert not any(re.search(r"RESULTS|benchmarks/results|docs", given) for given in defaults)
    if path.name != "rows.py":
        assert not re.search(r"csv\.(Dict)?[wW]riter", text)
    for given in re.findall(r"(?:write_rows|append_rows)\(([^,]*),", text):
        assert not re.search(r"RESULTS|CURVES|EXPERTS", given.replace("with_name", "")) or (
            ".with_name(" in given
        )


def test_output_is_ignored_by_git():
    assert rows.OUTPUT.relative_to(ROOT).parts[0] + "/" in (ROOT / ".gitignore").read_text()


def test_a_file_that_is_gone_on_with_is_told(tmp_path, capsys):
    rows.tell_kept(tmp_path / "rows.csv")
    assert not capsys.readouterr().out
    write_rows(tmp_path / "rows.csv", ("a",), [{"a": 1}, {"a": 2}])
    rows.tell_kept(tmp_path / "rows.csv")
    assert "2 rows are in" in capsys.readouterr().out
