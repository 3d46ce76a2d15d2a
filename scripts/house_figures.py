"""Lines of code by room, and the private names of other projects that the packages read.

A line of code holds a token that is neither a comment nor a docstring. ::

    python scripts/house_figures.py            # a table of rooms, and the number of private names
    python scripts/house_figures.py --private  # each private name with the files that read it

A private name begins with one underscore and is defined nowhere in our packages: a part of an
import from another project, an attribute, or a string given to getattr, hasattr or setattr.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "torch_fp8"
PACKAGES = (ENGINE, "torch_fp8_tools", "lightning_fp8", "accelerate_fp8")
FOLDERS = (*PACKAGES, "benchmarks", "examples", "scripts", "tests")
NEW_ROOMS: dict[str, tuple[str, ...]] = {
    "loss head": (
        *(f"torch_fp8/kernels/{n}.py" for n in ("cross_entropy", "cross_entropy_kernels")),
        "torch_fp8/kernels/loss_arguments.py",
        *(f"torch_fp8/ops/{n}.py" for n in ("cross_entropy", "head_products")),
        "torch_fp8/ops/linear_cross_entropy.py",
        *(f"torch_fp8/nn/{n}_logits.py" for n in ("deferred", "graph", "lazy")),
        *(f"torch_fp8/nn/logit_{n}.py" for n in ("losses", "steps")),
        *(f"torch_fp8/nn/loss_{n}.py" for n in ("function", "head")),
        *(f"torch_fp8/nn/{n}.py" for n in ("head_call", "linear_form", "output_layer")),
        "torch_fp8/conversion/output_layers.py",
    ),
    "bf16_last": ("torch_fp8/nn/bf16_forward.py", "torch_fp8/conversion/forward_precision.py"),
    "compare": ("torch_fp8_tools/compare/",),
    "shared inputs": (
        *(f"torch_fp8/nn/{n}.py" for n in ("group_function", "input_group")),
        *(f"torch_fp8/{room}/side_by_side.py" for room in ("kernels", "ops")),
    ),
}
"""Rooms that are newer than the bounds, and counted separately: their files."""
NEW_TESTS: dict[str, tuple[str, ...]] = {
    "loss head": (
        "tests/torch_fp8/loss_head/",
        "tests/accelerate_fp8/test_trl_heads.py",
        *(f"tests/planted/{n}.py" for n in ("loss_head", "output_layer")),
        "tests/torch_fp8_tools/plan/test_loss_workspace.py",
    ),
    "bf16_last": (
        "tests/torch_fp8/nn/test_bf16_forward.py",
        *(f"tests/{host}_fp8/test_last_steps.py" for host in ("accelerate", "lightning")),
    ),
    "compare": ("tests/torch_fp8_tools/compare/", "tests/planted/compare.py"),
    "shared inputs": ("tests/torch_fp8/nn/test_input_group.py",),
}
"""The files of the tests of `NEW_ROOMS`."""
_BY_NAME = ("getattr", "hasattr", "setattr")
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code_lines(source: str) -> int:
    """Count the lines that hold code: not blank, no comment, no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in _docstrings(ast.parse(source)):
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _docstrings(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the strings that stand alone: docstrings, and those below a constant or a field."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield node


def rooms(root: Path = ROOT) -> dict[str, list[Path]]:
    """Return the files of each room: a package of the engine, or another folder as a whole."""
    files: dict[str, list[Path]] = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).parts
            inside = folder == ENGINE and len(parts) > 2
            files["/".join(parts[:2]) if inside else folder].append(path)
    files["start-up"] = sorted(root.glob("_fp8_*.py"))
    return files


def new_code(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return the lines of code of each file of each new room."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    names = {path.relative_to(root).as_posix(): path for path in paths}
    return {
        room: {n: code_lines(path.read_text()) for n, path in names.items() if n.startswith(files)}
        for room, files in NEW_ROOMS.items()
    }


def new_test_lines(root: Path = ROOT) -> dict[str, int]:
    """Return the lines of the tests of each new room, as `wc` counts them."""
    names = {path.relative_to(root).as_posix(): path for path in (root / "tests").rglob("*.py")}
    return {
        room: sum(len(p.read_text().splitlines()) for n, p in names.items() if n.startswith(files))
        for room, files in NEW_TESTS.items()
    }


def trees(root: Path = ROOT) -> dict[str, ast.Module]:
    """Return the syntax tree of each file of our packages, by its path."""
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def own_names(root: Path = ROOT) -> set[str]:
    """Return the names that our packages define."""
    return {name for tree in trees(root).values() for name in _defined(tree)}


def private_names(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the files that read each private name of another project, by name."""
    sources = trees(root)
    own = own_names(root)
    readers: dict[str, list[str]] = defaultdict(list)
    for path, tree in sources.items():
        for name in sorted(_read(tree) - own):
            readers[name].append(path)
    return dict(sorted(readers.items()))


def _is_private(name: str) -> bool:
    is_ours = name.startswith(("__", "_fp8_"))  # modules next to the packages, attributes
    return name.startswith("_") and not is_ours and name.isidentifier()


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def _read(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in PACKAGES:
            names.update((node.module or "").split("."), (alias.name for alias in node.names))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _BY_NAME:
            texts = (a.value for a in node.args[1:2] if isinstance(a, ast.Constant))
            names.update(text for text in texts if isinstance(text, str))
    return {name for name in names - {"_"} if _is_private(name)}


def arrows(root: Path = ROOT) -> set[tuple[str, str]]:
    """Return (importer, imported) for the engine's rooms, each of which is a package."""
    found: set[tuple[str, str]] = set()
    packages = {path.parent.name for path in (root / ENGINE).glob("*/__init__.py")}
    for path in (root / ENGINE).glob("*/**/*.py"):
        own = path.relative_to(root / ENGINE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{ENGINE}."):
                found.add((own, str(node.module).split(".")[1]))
    return {(own, other) for own, other in found if own != other and other in packages}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--private", action="store_true", help="list the private names")
    options = parser.parse_args()
    names = private_names()
    if options.private:
        for name, paths in names.items():
            print(f"{name}: {', '.join(paths)}")
        return
    totals: Counter[str] = Counter()
    packages = tests = 0
    print(f"{'room':28}{'files':>6}{'lines':>8}{'code':>8}")
    for room, paths in rooms().items():
        sources = [path.read_text() for path in paths]
        lines, code = sum(len(s.splitlines()) for s in sources), sum(map(code_lines, sources))
        print(f"{room:28}{len(paths):6}{lines:8}{code:8}")
        packages += code * (room.split("/")[0] in (*PACKAGES, "start-up"))
        tests += lines * (room == "tests")
        if room.split("/")[0] == ENGINE:
            totals.update(files=len(paths), lines=lines, code=code)
    print(f"{'engine':28}{totals['files']:6}{totals['lines']:8}{totals['code']:8}")
    print(f"{'packages with start-up':42}{packages:8}")
    apart = new_code()
    for room, files in apart.items():
        print(f"{'  apart: ' + room:28}{len(files):6}{sum(files.values()):16}")
    files = {name: code for of_room in apart.values() for name, code in of_room.items()}
    engine = sum(code for name, code in files.items() if name.startswith(f"{ENGINE}/"))
    print(f"{'engine without them':42}{totals['code'] - engine:8}")
    print(f"{'packages without them':42}{packages - sum(files.values()):8}")
    print(f"{'tests without theirs':34}{tests - sum(new_test_lines().values()):8}")
    print(f"arrows between rooms of the engine: {len(arrows())}")
    for package in PACKAGES:
        read = [n for n, paths in names.items() if any(p.startswith(f"{package}/") for p in paths)]
        print(f"private names in {package}: {len(read)}")


if __name__ == "__main__":
    main()
