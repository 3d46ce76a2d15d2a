"""`Fault`: one mistake in the packages, and the tests that have to notice it."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A replacement of text in one file.

    Attributes:
        name: short description of the mistake.
        file: path of the file, from the root of the repository.
        right: text that stands exactly once in the file.
        wrong: text that takes its place.
        tests: arguments of pytest, separated by spaces: files, or ``file::test``.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: str
