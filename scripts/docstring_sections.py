"""For mkdocs: docstrings whose sections (``Args:``, ``Raises:``) follow without a blank line."""

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(?<=[^\n])\n(?=(?:Args|Attributes|Returns|Raises|Yields):\n)")


class DocstringSections(griffe.Extension):
    """Puts the blank line in that griffe wants above a section."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)
