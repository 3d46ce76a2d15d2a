"""Digests of the kernels' code, by which what was recorded of them is known to be theirs."""

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "torch_fp8" / "kernels"
RESOURCES = ROOT / "benchmarks" / "results" / "kernel_resources.csv"
LAUNCHING = ("driver", "launch_tape", "quick_launch")
"""Modules about when and how launches happen, which compile nothing."""


def digests(folder: Path = KERNELS) -> dict[str, str]:
    """Return 12 hexadecimal digits for each function's code and for what it uses of `folder`,
    without comments and docstrings, and without `LAUNCHING`.
    """
    paths = [path for path in folder.glob("*.py") if path.stem not in LAUNCHING]
    modules = {path.stem: _definitions(path) for path in paths}
    made = {}
    for module, (defined, _) in sorted(modules.items()):
        for name in (n for n, node in defined.items() if isinstance(node, ast.FunctionDef)):
            used: dict[tuple[str, str], str] = {}
            _add_code(modules, module, name, used)
            code = "\n".join(sorted(used.values()))  # in whichever files they are
            made[name.strip("_")] = hashlib.sha256(code.encode()).hexdigest()[:12]
    return made


_Definitions = tuple[dict[str, ast.stmt], dict[str, tuple[str, str]]]


def _definitions(path: Path) -> _Definitions:
    """Return the statement that defines each name of a module, and where imported ones are from."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            node.body = [part for part in node.body if not _is_text(part)]
    defined: dict[str, ast.stmt] = {}
    imported: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            package, _, source = str(node.module).rpartition(".")
            if package == "torch_fp8.kernels":
                imported |= {a.asname or a.name: (source, a.name) for a in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        else:
            targets = (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and _is_set(n))
            defined |= {name: node for name in targets if name not in defined}
    return defined, imported


def _add_code(
    modules: dict[str, _Definitions], module: str, name: str, used: dict[tuple[str, str], str]
) -> None:
    """Add the code of a name and of what it uses, unless it is there or from elsewhere."""
    defined, imported = modules.get(module, ({}, {}))
    if name in imported:
        _add_code(modules, *imported[name], used)
    elif name in defined and (module, name) not in used:
        used[module, name] = ast.unparse(defined[name])
        names = [node for node in ast.walk(defined[name]) if isinstance(node, ast.Name | ast.arg)]
        local = {node.arg for node in names if isinstance(node, ast.arg)}
        if isinstance(defined[name], ast.FunctionDef):
            local |= {n.id for n in names if isinstance(n, ast.Name) and _is_set(n)}
        for node in names:
            if isinstance(node, ast.Name) and node.id not in local:
                _add_code(modules, module, node.id, used)


def _is_set(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
