"""For mkdocs: this project's docstrings as griffe reads them.

A section (``Args:``, ``Raises:``) may follow without a blank line, and one text may describe
several names (``rows, cols: ...``), which griffe would read as one name.
"""

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(?<=[^\n])\n(?=(?:Args|Attributes|Returns|Raises|Yields):\n)")
_SEVERAL = re.compile(r"^    (\w+(?:,\s+\w+)+):((?:.*)(?:\n {5,}.*)*)", re.MULTILINE)


class DocstringSections(griffe.Extension):
    """Gives each section its blank line, and each name its own text."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _SECTION.sub("\n\n", obj.docstring.value)
            obj.docstring.value = _SEVERAL.sub(_each_name, text)


def _each_name(found: re.Match[str]) -> str:
    return "\n".join(f"    {name}:{found[2]}" for name in re.split(r",\s+", found[1]))
