"""docs/private-interfaces.md names each private interface of other packages that the code uses."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "private-interfaces.md"
PACKAGES = ("torch_fp8", "lightning_fp8", "accelerate_fp8")
OURS = (*PACKAGES, "_fp8")


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def _trees():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def _own_names():
    """Private names that the packages define themselves, be it as attributes."""
    own = set()
    for _, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            elif isinstance(node, ast.alias) and node.asname:
                own.add(node.asname)
    return own


def private_interfaces():
    """The private names of others that the packages use: names, and modules that are imported."""
    own, found = _own_names(), set()
    for _, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not str(node.module).startswith(OURS):
                parts = str(node.module).split(".")
                found |= {part for part in parts if _is_private(part)}
                found |= {alias.name for alias in node.names if _is_private(alias.name)}
            elif isinstance(node, ast.Import):
                parts = [part for alias in node.names for part in alias.name.split(".")]
                found |= {part for part in parts if _is_private(part) and part[:4] != "_fp8"}
            elif isinstance(node, ast.Attribute) and _is_private(node.attr):
                found |= {node.attr} - own
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                names = [x.value for x in node.args[1:2] if isinstance(x, ast.Constant)]
                found |= {name for name in names if _is_private(name)} - own
    return found


@pytest.fixture(scope="module")
def named():
    """The private names in the first column of the page's tables."""
    cells = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.M)
    parts = [
        part
        for cell in cells
        for name in re.findall(r"`([^`]+)`", cell)
        for part in name.split(".")
    ]
    return {part for part in parts if _is_private(part)}


def test_each_private_interface_has_its_reason(named):
    assert sorted(private_interfaces() - named) == []


def test_the_page_names_no_interface_that_is_not_used(named):
    assert sorted(named - private_interfaces()) == []
