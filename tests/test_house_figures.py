import re

import pytest

from scripts.house_figures import (
    NEW_ROOMS,
    NEW_TESTS,
    PACKAGES,
    ROOT,
    code_lines,
    new_code,
    new_test_lines,
    private_names,
    rooms,
)

SOURCE = '''"""A module's docstring,
of two lines."""

import torch  # a comment beside code

# a comment alone
LIMIT = 1
"""A text below a constant."""


def double(
    x,
):
    """A docstring."""
    return f"""{x}
    {x}"""
'''


def test_comments_blank_lines_and_docstrings_are_no_code():
    assert code_lines(SOURCE) == 7


def test_private_names_are_those_of_other_projects(tmp_path):
    for package in ("torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8"):
        (tmp_path / package).mkdir()
    (tmp_path / "torch_fp8/one.py").write_text("self._own = torch._C._theirs\n")
    (tmp_path / "lightning_fp8/two.py").write_text("getattr(x, '_read', x._own).__dict__\n")
    assert private_names(tmp_path) == {
        "_C": ["torch_fp8/one.py"],
        "_read": ["lightning_fp8/two.py"],
        "_theirs": ["torch_fp8/one.py"],
    }


def test_new_rooms_name_files_that_exist():
    for room, files in NEW_ROOMS.items():
        missing = [name for name in (*files, *NEW_TESTS[room]) if not (ROOT / name).exists()]
        assert not missing, room
        assert len(new_code()[room]) >= len(files)
        assert new_test_lines()[room] > 100


def test_the_lines_that_the_documentation_names_are_counted():
    """Each row of "Why so much code" is within 5 % of what its rooms have."""
    page = (ROOT / "docs/contributing.md").read_text()
    page = page[page.index("## Why so much code") : page.index("## Architecture")]
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \| (.+?) \|$", page, re.M)
    new = {ROOT / name for room in ("loss head", "bf16_last") for name in NEW_ROOMS[room]}
    files = {room.rpartition("/")[2]: paths for room, paths in rooms().items()}
    total = 0
    for purpose, stated, names in rows:
        total += int(stated.replace(",", ""))
        if purpose.startswith("an output layer"):
            counted = sum(code_lines(path.read_text()) for path in new)
        else:
            where = [*re.findall(r"`(\w+)`", names), *re.findall(r"start-up", names)]
            paths = [p for name in where for p in files[name] if p not in new]
            counted = sum(code_lines(path.read_text()) for path in paths)
        assert int(stated.replace(",", "")) == pytest.approx(counted, rel=0.05), purpose
    folders = (*PACKAGES, "start-up")
    packages = [p for room, paths in rooms().items() if room.startswith(folders) for p in paths]
    assert total == pytest.approx(sum(code_lines(p.read_text()) for p in packages), rel=0.03)
