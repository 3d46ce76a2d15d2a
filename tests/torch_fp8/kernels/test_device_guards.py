import ast
import inspect
import re
from pathlib import Path

import torch_fp8
from torch_fp8.ops import registry

GUARD = "torch.cuda.device_of("


def _found(tree):
    """Launches and calls: ``(function, launched or called, whether it is guarded)``."""

    def visit(node, function, guarded):
        if isinstance(node, ast.FunctionDef):
            function, guarded = node.name, False
        if isinstance(node, ast.With):
            items = [ast.unparse(item.context_expr) for item in node.items]
            guarded = guarded or any(item.startswith(GUARD) for item in items)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Subscript):
                launched = ast.unparse(node.func.value)
                if launched.endswith("_kernel"):
                    yield function, launched, guarded
            elif isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                yield function, name, guarded
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, guarded)

    return list(visit(tree, "", False))


def _operators(source):
    """Names of operators whose launchers the registry calls: all without one of their own."""
    marks = {
        node.name: [mark for mark in node.decorator_list if isinstance(mark, ast.Call)]
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }
    return {
        name
        for name, calls in marks.items()
        for call in calls
        if ast.unparse(call.func) == "operator" and "cuda" not in {k.arg for k in call.keywords}
    }


def _imported(source):
    """Names that a file takes from modules of kernels, directly or as the module's attributes."""
    nodes = list(ast.walk(ast.parse(source)))
    modules = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    taken = [n for n in modules if re.match(r"torch_fp8\.kernels\b", n.module)]
    names = {alias.asname or alias.name for node in taken for alias in node.names}
    read = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    return names | {node.attr for node in read if node.value.id in names}


def _unguarded(sources, others=(), operators=()):
    """Kernels that a function launches without a guard, where its callers have none either.

    Args:
        sources: of launchers.
        others: sources of code that may call these.
        operators: names of operators, whose launchers the registry calls with a guard.
    """
    found = [each for source in sources for each in _found(ast.parse(source))]
    calls = [each for each in found if each[0] != each[1]]
    outside = {name for source in others for name in _imported(source)}
    inner = {called for _, called, _ in calls} | set(operators)
    exposed = {function for function, *_ in found if function not in inner - outside}
    for _ in found:  # as deep as calls may go
        exposed |= {called for by, called, guarded in calls if by in exposed and not guarded}
    known = "add_kernel"  # a method of torch's table
    launches = [each for each in found if each[1].endswith("_kernel") and each[1] != known]
    assert launches
    return [kernel for by, kernel, guarded in launches if by in exposed and not guarded]


def test_every_launch_is_on_the_card_of_its_tensors():
    package = Path(torch_fp8.__file__).parent
    files = {file: file.read_text() for file in package.rglob("*.py")}
    launchers = [files.pop(file) for file in package.glob("kernels/*.py")]
    operators = {name for file in package.glob("ops/*.py") for name in _operators(files[file])}
    assert "quantize_2d" in operators
    assert _unguarded(launchers, files.values(), operators) == []
    assert _unguarded(launchers, files.values())


def test_the_registry_calls_launchers_with_a_guard():
    guards = re.findall(r"with torch\.cuda\.device_of\(first\).*\n +return getattr\(", _registry())
    assert len(guards) == _registry().count("getattr(_module(")


def _registry():
    return inspect.getsource(registry)
