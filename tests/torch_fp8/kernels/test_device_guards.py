"""Each kernel is launched on the card of its tensors, whichever one is current."""

import ast
import re
from pathlib import Path

import torch_fp8

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
            elif isinstance(node.func, ast.Name):
                yield function, node.func.id, guarded
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, guarded)

    return list(visit(tree, "", False))


def _unguarded(sources, others=""):
    """Kernels that a function launches without a guard, where its callers have none either.

    Args:
        sources: of launchers.
        others: the source of code that may call these.
    """
    found = [each for source in sources for each in _found(ast.parse(source))]
    calls = [each for each in found if each[0] != each[1]]
    inner, outside = {called for _, called, _ in calls}, set(re.findall(r"\b[a-z]\w*", others))
    exposed = {function for function, *_ in found if function not in inner - outside}
    for _ in found:  # as deep as calls may go
        exposed |= {called for by, called, guarded in calls if by in exposed and not guarded}
    launches = [each for each in found if each[1].endswith("_kernel")]
    assert launches
    return [kernel for by, kernel, guarded in launches if by in exposed and not guarded]


def test_every_launch_is_on_the_card_of_its_tensors():
    package = Path(torch_fp8.__file__).parent
    files = {*package.rglob("*.py")}
    launchers = {*package.glob("kernels/*.py")}
    others = "".join(file.read_text() for file in files - launchers)
    assert _unguarded([file.read_text() for file in launchers], others) == []


def test_a_launch_without_a_guard_is_found():
    launch, guard = "cast_kernel[(1,)](x)", f"with {GUARD}x):"
    assert _unguarded([f"def f(x):\n  {launch}"]) == ["cast_kernel"]
    assert _unguarded([f"def f(x):\n  {guard}\n    {launch}"]) == []
    inner, outer = f"def g(x):\n  {launch}\n", f"def f(x):\n  {guard}\n    g(x)"
    assert _unguarded([inner, outer]) == []
    assert _unguarded([inner, outer], "from kernels import g") == ["cast_kernel"]
    assert _unguarded([inner, outer + "\n  g(x)"]) == ["cast_kernel"]
