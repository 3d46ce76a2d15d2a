"""Python's standard library as a corpus: its source files, and its functions with their docstrings.

Every machine that can run the examples has this text. The list of files is sorted, and the hash of
its name decides whether a file is held out, so two runs on one Python version see the
same text in the same order.
"""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

EXCLUDED_DIRECTORIES = {
    "__pycache__",
    "dist-packages",
    "encodings",  # character tables
    "idle_test",
    "pydoc_data",  # one 700 kB dictionary of prose
    "site-packages",
    "test",
    "tests",
}
HELD_OUT_ONE_IN = 10


def source_files(root: Path | None = None, one_in: int = 1) -> list[Path]:
    """Return the library's modules, sorted; `one_in` keeps about every n-th of them, by hash.

    Args:
        root: folder of the library, or None for that of the running Python.
        one_in: 1 keeps all files.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    names = [
        name
        for name in names
        if EXCLUDED_DIRECTORIES.isdisjoint(name.parts)
        and _hash(f"sample {name.as_posix()}") % one_in == 0
    ]
    bar = tqdm(names, desc="reading the standard library", delay=2.0, leave=False)
    return [root / name for name in bar if _readable(root / name)]


def is_held_out(path: Path) -> bool:
    """Return whether the file is left out of pre-training and of the training instructions."""
    return _hash(f"held out {path.parent.name}/{path.name}") % HELD_OUT_ONE_IN == 0


def documented_functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (source of a function without its docstring, first paragraph of the docstring).

    Args:
        path: a Python file.
    """
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        if docstring is None or node.body[0].lineno == node.lineno:
            continue
        first, last = node.body[0].lineno - 1, node.body[0].end_lineno
        code = textwrap.dedent(
            "".join(lines[node.lineno - 1 : first] + lines[last : node.end_lineno])
        )
        yield code.rstrip(), " ".join(docstring.split("\n\n")[0].split())


def _readable(path: Path) -> bool:
    try:
        ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return False  # templates and files that only older Pythons parse
    return True


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
