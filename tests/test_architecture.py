"""What the design forbids: imports against the order of the rooms, and effects of importing."""

import ast
import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.processes import ran

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8")

# A package of the engine imports only from the lines above its own, and itself.
FLOORS = [
    {"_version", "quantization"},
    {"config", "kernels", "autograd"},
    {"ops"},
    {"tensor"},
    {"nn"},
    {"optim"},
    {"distributed"},
    {"conversion"},
    {"checkpoint"},
    {"monitor"},
    {"__main__"},
]
FLOORS_OF_TOOLS = [
    {"host_models", "metrics"},
    {"env"},
    {"plan", "report", "compare"},
    {"parsers"},
    {"cli", "export_checkpoint", "stock_states"},
]
FLOORS_OF_DISTRIBUTED = [
    {"collectives", "agreement"},
    {"config_check", "averaging"},
    {"links"},
    {"fsdp"},
    {"ddp", "tensor_parallel"},
]
EXPORTING = {"torch_fp8", "torch_fp8.distributed", "lightning_fp8", "accelerate_fp8"}
STARTED = "tests/torch_fp8/missing_packages.py"
"""A program that tests start without this folder on its path, as those in folders `scripts`."""
RIDDLES = {
    *("Of", "By", "Within", "Without", "Where", "As", "And", "But", "Likewise", "Nothing"),
    *("It", "Its", "They", "Their", "Them", "Those", "He", "Who", "Whose"),
}
"""First words of docstrings whose subject stands elsewhere, if anywhere: "Of a message." """
VAGUE = {"made", "kept", "how", "here", "found"}
"""Names of local variables that say nothing of what they hold."""
MOST_VAGUE, MOST_PREPOSITIONS = 10, 0
"""Bounds that only fall: vague locals, and descriptions that begin with "of", "by" or "that"."""
WRONG_IN_A_TORCH = {"torch.compiler.is_exporting": "true in every graph of Dynamo 2.11"}
"""Names that a supported torch computes wrongly, which a test on the newest torch does not see."""
MAY_IMPORT = {
    "torch_fp8": {"torch", "torch_fp8", "_fp8_command"},
    "torch_fp8_tools": {"torch", "torch_fp8", "torch_fp8_tools", "_fp8_autoload", "_fp8_points"},
    "lightning_fp8": {
        *("torch", "torch_fp8", "lightning_fp8", "_fp8_autoload", "_fp8_points"),
        *("lightning", "lightning_fabric", "pytorch_lightning"),
    },
    "accelerate_fp8": {
        *("torch", "torch_fp8", "accelerate_fp8", "_fp8_autoload", "_fp8_check", "_fp8_points"),
        *("accelerate", "transformers", "trl", "peft", "packaging", "safetensors"),
    },
}


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _sources(package):
    return sorted((ROOT / package).rglob("*.py"))


def test_nothing_relies_on_what_a_supported_torch_gets_wrong():
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            used = {
                ast.unparse(n)
                for n in ast.walk(ast.parse(path.read_text()))
                if isinstance(n, ast.Attribute)
            }
            assert not used & set(WRONG_IN_A_TORCH), path


@pytest.mark.parametrize(
    ("package", "floors"),
    [
        ("torch_fp8", FLOORS),
        ("torch_fp8.distributed", FLOORS_OF_DISTRIBUTED),
        ("torch_fp8_tools", FLOORS_OF_TOOLS),
    ],
)
def test_packages_import_only_from_those_above(package, floors):
    order = {name: i for i, names in enumerate(floors) for name in names}
    depth = package.count(".") + 1
    folder = ROOT / package.replace(".", "/")
    for path in sorted(folder.rglob("*.py")):
        own = path.relative_to(folder).with_suffix("").parts[0]
        if own == "__init__":
            continue
        assert own in order, f"{path} has no place in the order of the packages"
        for name in _imports(path):
            target = name.split(".")
            if target[:depth] == package.split(".") and len(target) > depth:
                other = target[depth]
                allowed = other not in order or other == own or order[other] < order[own]
                assert allowed, (str(path), name)


@pytest.mark.parametrize("package", [*PACKAGES, "torch_fp8.distributed"])
def test_every_public_name_can_be_imported(package):
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_few_files_lie_in_the_package_itself():
    assert len(list((ROOT / "torch_fp8").glob("*.py"))) <= 5


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_their_prefix_names(package):
    for path in _sources(package):
        allowed = MAY_IMPORT[package] | set(sys.stdlib_module_names)
        if "kernels" in path.parts:
            allowed = allowed | {"triton"}
        if path.parts[-2:] == ("nn", "transformer_engine.py"):
            allowed = allowed | {"transformer_engine"}
        if path == ROOT / "torch_fp8" / "__init__.py":
            allowed = allowed | {"torch_fp8_tools"}  # type checkers read where `plan` is
        for name in _imports(path):
            assert name.split(".")[0] in allowed, f"{path}: imports {name}"


def test_the_engine_loads_its_tools_only_when_it_is_asked_for_plan():
    """Neither an import nor a name in a string leads to torch_fp8_tools from a training path."""
    engine = [p for name in PACKAGES if name != "torch_fp8_tools" for p in _sources(name)]
    naming = {path for path in engine if "torch_fp8_tools" in path.read_text()}
    assert naming == {ROOT / "torch_fp8" / "__init__.py"}
    loaded = _run(
        """
        import json, sys
        import torch_fp8
        names = [name for name in torch_fp8.__all__ if name not in ("plan", "Plan", "LevelPlan")]
        for name in names:
            getattr(torch_fp8, name)
        before = [name for name in sys.modules if name.startswith("torch_fp8_tools")]
        torch_fp8.plan
        print(json.dumps([before, "torch_fp8_tools.plan.plan" in sys.modules]))
        """
    )
    assert loaded == [[], True]


@pytest.mark.parametrize("name", ["count_communication", "CommunicationCount"])
@pytest.mark.parametrize("package", ["torch_fp8", "torch_fp8.distributed"])
def test_a_name_that_was_public_says_what_to_take(package, name):
    with pytest.raises(ImportError, match=f"torch_fp8.{name} was removed: use torch.profiler, or"):
        exec(f"from {package} import {name}")


def test_only_tests_of_the_benchmarks_import_them():
    """The emulator and the kernels' cases lie in tests/, where both find them."""
    of_benchmarks = {ROOT / "tests" / "benchmarks", ROOT / "tests" / "comparison"}
    importing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if not of_benchmarks & set(path.parents)
        and any(name.split(".")[0] == "benchmarks" for name in _imports(path))
    }
    assert importing == set()


def _internals(path):
    """Yield what a file imports of the packages that is neither exported nor in `torch_fp8.ops`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in PACKAGES:
            module = importlib.import_module(node.module) if node.module in EXPORTING else None
            exported = {"ops", "distributed", *getattr(module, "__all__", ())}
            if not f"{node.module}.".startswith("torch_fp8.ops."):
                yield from (f"{node.module}.{a.name}" for a in node.names if a.name not in exported)
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.split(".")[0] in PACKAGES]
            yield from (n for n in names if "." in n and not n.startswith("torch_fp8.ops."))


def test_tests_import_internals_through_one_door():
    importing = {
        path.relative_to(ROOT).as_posix(): names
        for path in (ROOT / "tests").rglob("*.py")
        if "scripts" not in path.parts and path != ROOT / STARTED and (names := [*_internals(path)])
    }
    assert importing == {}


def test_internals_lists_what_tests_import():
    internals = importlib.import_module("tests.internals")
    door = {*internals._HOMES, *internals._MODULES}
    imported = {
        alias.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "tests.internals"
        for alias in node.names
    }
    assert imported == door


def test_the_numbers_of_the_formats_have_one_home():
    """448 and 57344 stand in formats.py; a kernel has them as its compiler's constants too."""
    for path in _sources("torch_fp8"):
        if path.name == "formats.py" or "kernels" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and type(node.value) in (int, float):
                assert node.value not in (448, 57344), path


def _strings(node):
    """Yield (line, text) of all docstrings of a tree, those of fields and constants too."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for owner in (n for n in ast.walk(node) if isinstance(n, owners)):
        for statement in owner.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value).strip()


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_are_sentences_that_a_stranger_understands(package):
    riddles = []
    for path in _sources(package):
        for line, text in _strings(ast.parse(path.read_text())):
            summary = text.partition("\n\n")[0].rstrip()
            if text.split()[0].rstrip(",:;") in RIDDLES or not summary.endswith((".", ":")):
                riddles.append(f"{path.relative_to(ROOT)}:{line}: {summary}")
    assert not riddles, "\n".join(riddles)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_and_classes_have_docstrings(package):
    for path in _sources(package):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name[0] != "_":
                assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name}"


def _run(code, **environment):
    done = ran(sys.executable, "-c", code, **environment)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_importing_the_engine_changes_nothing_of_torch():
    changed, imported = _run(
        """
        import json, sys
        import torch, torch._dynamo, torch.distributed as dist, torch.nn.functional as F
        from torch.distributed import fsdp
        owners = [torch, torch.Tensor, F, torch.nn, torch.nn.Linear, torch.nn.Module, dist,
                  torch.nn.parallel, torch.optim, torch.optim.AdamW, torch.optim.Optimizer, fsdp,
                  torch.autograd, torch.library]
        snapshot = lambda: {(i, k): id(v) for i, o in enumerate(owners) for k, v in vars(o).items()}
        before, modules = snapshot(), set(sys.modules)
        import torch_fp8
        for name in torch_fp8.__all__:
            getattr(torch_fp8, name)
        after = snapshot()
        changed = [str(k) for k in before if after.get(k) != before[k]]
        hosts = ("triton", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate",
                 "transformers", "trl", "peft", "numpy", "transformer_engine")
        new = {m.split(".")[0] for m in set(sys.modules) - modules}
        print(json.dumps([changed, sorted(new & set(hosts))]))
        """
    )
    assert changed == []
    assert imported == []


_SLOW_IMPORTS = (
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"),
    *("torch.distributed.checkpoint", "torch.testing", "torch.utils.flop_counter"),
    *("sympy", "mpmath", "triton", "numpy", "networkx", "jinja2", "rich", "matplotlib"),
)
"""Modules that take a tenth of a second and more, and none of which `import torch` imports."""


@pytest.fixture(scope="module")
def imported():
    """Modules that one process has after each of its imports, and public names of a room."""
    return _run("""
    import json, sys, torch
    steps = [list(sys.modules)]
    import torch_fp8, torch_fp8.config, torch_fp8_tools.cli
    try:
        torch_fp8_tools.cli.main(["--help"])
    except SystemExit:
        steps.append(list(sys.modules))
    names = torch_fp8.distributed.__all__  # without an import of its own
    print(json.dumps([*steps, names]))
    """)


def test_importing_the_package_imports_nothing_slow(imported):
    """``import torch_fp8`` takes little longer than ``import torch``; ``torch-fp8 --help`` too."""
    with_torch, with_ours, _ = map(set, imported)
    assert set(_SLOW_IMPORTS) & (with_ours - with_torch) == set()
    rooms = {name.split(".")[1] for name in with_ours if name.startswith("torch_fp8.")}
    assert not {"nn", "optim", "distributed", "conversion"} & rooms


def test_the_command_imports_no_host_by_being_imported(imported):
    hosts = {"lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}
    hosts |= {"transformers", "trl", "peft", "transformer_engine", "torchao"}
    assert hosts & set(imported[1]) == set()


def test_torch_alone_imports_none_of_our_packages(imported):
    assert set(PACKAGES) & set(imported[0]) == set()
    assert "_fp8_autoload" in imported[0]


def test_the_lists_of_public_names_agree():
    """What type checkers read, and where a name is defined; ``as`` makes it public for them."""
    import torch_fp8

    block = next(
        node
        for node in ast.parse((ROOT / "torch_fp8/__init__.py").read_text()).body
        if isinstance(node, ast.If)
    )
    read = {name.asname: node.module for node in block.body for name in node.names}
    assert read == torch_fp8._HOMES
    assert set(torch_fp8.__all__) <= set(dir(torch_fp8))
    with pytest.raises(AttributeError, match="module 'torch_fp8' has no attribute 'FP8config'"):
        torch_fp8.FP8config  # noqa: B018


def test_packages_of_the_engine_are_there_without_an_import_of_their_own(imported):
    assert imported[2]


@pytest.mark.long
@pytest.mark.parametrize("entry", ["import torch_fp8", "import _fp8_command as c; c.main()"])
def test_where_numpy_is_missing_nothing_is_printed(entry):
    code = f"import sys; sys.modules['numpy'] = None; sys.argv = ['torch-fp8', '--help']; {entry}"
    assert ran(sys.executable, "-c", code).stderr == ""


def test_no_room_of_the_engine_names_hosts_to_import():
    hosts = MAY_IMPORT["lightning_fp8"] | MAY_IMPORT["accelerate_fp8"]
    hosts -= {"torch", "torch_fp8", "safetensors"}  # the library of a file format is no host
    for path in _sources("torch_fp8"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
                names = [a.value for a in node.args if isinstance(a, ast.Constant)]
                assert not any(str(name).split(".")[0] in hosts for name in names), path


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_short_and_typed(package):
    assert (ROOT / package / "py.typed").exists()
    for path in _sources(package):
        lines = len(path.read_text().splitlines())
        assert lines <= 350, f"{path}: {lines} lines"


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts"])
def test_what_programs_import_of_the_packages_exists(folder):
    pytest.importorskip("triton")
    for path in _sources(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in PACKAGES:
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    if not hasattr(module, name):  # a module of its own
                        assert importlib.util.find_spec(f"{node.module}.{name}"), path


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_of_a_module_is_defined_once(package):
    for path in _sources(package):
        body = ast.parse(path.read_text()).body
        functions = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        targets = [target for n in body if isinstance(n, ast.Assign) for target in n.targets]
        names = Counter([*functions, *(t.id for t in targets if isinstance(t, ast.Name))])
        assert not [name for name, count in names.items() if count > 1], path


def test_names_and_descriptions_are_nouns():
    vague = prepositions = 0
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_text()
            vague += sum(
                isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE
                for node in ast.walk(ast.parse(source))
            )
            described = r"^\s+\w+(?:, \w+)*(?: \([^)]*\))?: (?:of|by|that) "
            prepositions += len(re.findall(described, source, re.M))
    assert vague <= MOST_VAGUE
    assert prepositions <= MOST_PREPOSITIONS
