"""What scripts/house_figures.py counts."""

from scripts.house_figures import NEW_ROOMS, ROOT, code_lines, new_code, private_names

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
        missing = [name for name in files if not (ROOT / name).exists()]
        assert not missing, room
        assert len(new_code()[room]) >= len(files)
