"""The autoload module: a failure in it would break `import torch`, so each way to fail is tried."""

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import py_compile
import shutil
import sys
import threading
import types
import warnings
from pathlib import Path

import pytest

import _fp8_autoload
import _fp8_points
from _fp8_autoload import EXTENSIONS, ExtensionFinder
from tests.processes import ran

COST_LIMIT_MS = 1.0


def run_python(code: str, cwd: Path | None = None, **env: str) -> str:
    """Run `code` in a fresh interpreter (modules in `cwd` come first) and return its output."""
    return ran(sys.executable, "-c", code, cwd=cwd, **env).stdout.strip()


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A package `host`, whose `host.core` is to be extended by `host_fp8._register:extend`."""
    files = {
        "host/__init__.py": "from host import core",
        "host/core.py": "VALUE = 1",
        "host_fp8/__init__.py": "",
        "host_fp8/_register.py": "def extend(module): module.VALUE += 1",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] in ("host", "host_fp8")]:
        del sys.modules[name]


@pytest.fixture
def finder(monkeypatch):
    finder = ExtensionFinder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    return finder


def test_entry_point_is_what_torch_calls():
    (entry,) = [
        e for e in importlib.metadata.entry_points(group="torch.backends") if "fp8" in e.name
    ]
    assert entry.load() is _fp8_autoload.load


@pytest.mark.parametrize(
    ("module", "of_ours"), [(_fp8_autoload, ("_fp8_points",)), (_fp8_points, ())]
)
def test_file_is_small_and_imports_the_standard_library_only(module, of_ours):
    source = Path(module.__file__).read_text()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported <= {*sys.stdlib_module_names, *of_ours}
    assert len(source.splitlines()) < (150 if of_ours else 200)


def test_every_extension_function_exists():
    for target in EXTENSIONS.values():
        package, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(package), function)), target


def test_loading_imports_nothing_and_takes_under_a_millisecond(tmp_path):
    # As torch does it: at the end of `import torch`, with everything of torch's own imported; and
    # compiled, as pip installs it. The fastest of five: the machine may be busy otherwise.
    for module in (_fp8_autoload, _fp8_points):
        py_compile.compile(shutil.copy(module.__file__, tmp_path), doraise=True)
    code = """
        import json, sys, time
        import torch
        path, runs = list(sys.meta_path), []
        for _ in range(5):
            before = set(sys.modules)
            start = time.perf_counter()
            import _fp8_autoload
            _fp8_autoload.load()
            ms = 1000 * (time.perf_counter() - start)
            runs.append([ms, sorted(set(sys.modules) - before)])
            assert sys.meta_path != path
            sys.meta_path[:] = path
            del sys.modules["_fp8_autoload"], sys.modules["_fp8_points"], _fp8_autoload
        print(json.dumps(runs))
    """
    runs = json.loads(run_python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    assert all(new == ["_fp8_autoload", "_fp8_points"] for _, new in runs)
    assert min(ms for ms, _ in runs) < COST_LIMIT_MS


def test_autoload_can_be_switched_off():
    code = "import sys, torch; print('_fp8_autoload' in sys.modules)"
    assert run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"


@pytest.mark.long
def test_a_module_that_is_gone_has_the_way_out_that_the_docs_name(tmp_path):
    """A clone that was installed with -e and moved: only its entry point is left."""
    (tmp_path / "_fp8_autoload.py").write_text("raise ModuleNotFoundError('moved')")
    with pytest.raises(AssertionError, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        run_python("import torch", tmp_path)
    run_python("import torch", tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    page = (Path(__file__).parent.parent / "docs/install.md").read_text()
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in page
    assert "pip uninstall torch-fp8" in page


def test_registering_twice_adds_one_finder():
    before = list(sys.meta_path)
    _fp8_autoload.load()
    once = list(sys.meta_path)
    _fp8_autoload.load()
    _fp8_autoload.load("lightning_fp8")
    assert sys.meta_path == once
    assert len(once) - len(before) <= 1


def test_module_is_extended_once_it_ran_and_is_stock_otherwise(host, finder):
    finder.add("host.core", "host_fp8._register:extend")
    core = importlib.import_module("host").core
    assert core.VALUE == 2
    assert type(core.__spec__) is importlib.machinery.ModuleSpec  # stock again
    assert type(core.__spec__.loader).__name__ == "SourceFileLoader"
    assert core.__spec__.loader.get_source("host.core") == "VALUE = 1"


def test_module_imported_before_is_extended_at_once(host, finder):
    core = importlib.import_module("host.core")
    finder.add("host.core", "host_fp8._register:extend")
    finder.extend_imported()
    assert core.VALUE == 2


@pytest.fixture
def loading(host, finder, monkeypatch):
    """``loading(code)``: host.core loads us in the middle of its own import, as torch does it."""
    monkeypatch.setattr(_fp8_autoload, "_finder", finder)
    monkeypatch.setattr(_fp8_autoload, "EXTENSIONS", {"host.core": "host_fp8._register:extend"})

    def write(code):
        (host / "host/core.py").write_text(f"import _fp8_autoload\n_fp8_autoload.load()\n{code}\n")

    return write


@pytest.mark.parametrize("code", ["VALUE = 1", "_fp8_autoload.load()\nVALUE = 1"])
def test_half_imported_module_is_extended_when_it_is_complete(loading, finder, code):
    # As with `import accelerate`, perhaps followed by `import accelerate_fp8` while it is imported.
    loading(code)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        core = importlib.import_module("host.core")  # no other import follows
    assert core.VALUE == 2
    assert finder.status == {"host.core": "extended"}
    assert type(core.__spec__) is importlib.machinery.ModuleSpec  # stock again


def test_module_whose_import_failed_half_way_is_extended_at_the_next_try(host, finder, loading):
    loading("1 / 0")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("host.core")
    assert finder.status == {"host.core": "waiting"}
    (host / "host/core.py").write_text("VALUE = 1   # a file of another size, so no stale cache\n")
    assert importlib.import_module("host.core").VALUE == 2


def test_module_that_is_found_and_then_met_half_imported_is_extended_once(host, finder):
    # As lightning.fabric.connector is, when our package is imported for a module below it.
    sys.modules["host_finder"] = types.SimpleNamespace(finder=finder)
    (host / "host/core.py").write_text(
        "import host_finder\nhost_finder.finder.extend_imported()\nVALUE = 1\n"
    )
    finder.add("host.core", "host_fp8._register:extend")
    try:
        assert importlib.import_module("host.core").VALUE == 2
    finally:
        del sys.modules["host_finder"]


def test_module_that_another_thread_is_importing_is_extended(host, finder):
    running, go_on = threading.Event(), threading.Event()
    sys.modules["host_events"] = types.SimpleNamespace(running=running, go_on=go_on)
    (host / "host/core.py").write_text(
        "import host_events\nhost_events.running.set()\nhost_events.go_on.wait(60)\nVALUE = 1\n"
    )
    thread = threading.Thread(target=importlib.import_module, args=("host.core",))
    thread.start()
    assert running.wait(60)
    finder.add("host.core", "host_fp8._register:extend")
    finder.extend_imported()
    assert finder.status == {"host.core": "waiting"}
    go_on.set()
    thread.join()
    del sys.modules["host_events"]
    assert sys.modules["host.core"].VALUE == 2


def test_extension_that_imports_does_not_extend_another_twice(host, finder):
    # An import made by an extension comes back to the finder while others are still pending.
    (host / "host/other.py").write_text("VALUE = 1")
    (host / "host_fp8/more.py").write_text("")
    (host / "host_fp8/_register.py").write_text(
        "def extend(module):\n    module.VALUE += 1\n    import host_fp8.more\n"
    )
    for name in ("host.core", "host.other"):
        importlib.import_module(name)
        finder.add(name, "host_fp8._register:extend")
    finder.extend_imported()
    assert [sys.modules[name].VALUE for name in ("host.core", "host.other")] == [2, 2]


def test_two_finders_do_not_ask_each_other_for_ever(host, finder, monkeypatch):
    # Two of ours are there if this module was reloaded or is installed twice.
    class Counts:
        def find_spec(self, fullname, path=None, target=None):
            searches.append(fullname)

    second, searches = ExtensionFinder(), []
    monkeypatch.setattr(sys, "meta_path", [second, finder, Counts(), *sys.meta_path])
    for each in (finder, second):
        each.add("host.core", "host_fp8._register:extend")
    assert importlib.import_module("host.core").VALUE == 2  # one loader, extended once
    assert searches.count("host.core") <= 2


def test_module_whose_loader_takes_no_attributes_is_extended(host, finder):
    class SlotLoader:
        __slots__ = ()

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            module.VALUE = 1

    class SlotFinder:
        def find_spec(self, fullname, path=None, target=None):
            if fullname == "host.core":
                return importlib.machinery.ModuleSpec(fullname, SlotLoader())
            return None

    finder.add("host.core", "host_fp8._register:extend")
    sys.meta_path.insert(1, SlotFinder())
    assert importlib.import_module("host.core").VALUE == 2


@pytest.mark.parametrize(
    ("register", "message"),
    [
        ("def extend(module): raise RuntimeError('no such luck')", "RuntimeError: no such luck"),
        ("def extend(module): module.MOVED", "AttributeError"),
        ("", "AttributeError"),
        ("import not_installed_anywhere", "ModuleNotFoundError"),
        ("def extend(:", "SyntaxError"),
    ],
    ids=["raises", "upstream-name-moved", "function-missing", "import-fails", "syntax-error"],
)
def test_failing_extension_is_one_warning_and_a_stock_host(host, finder, register, message):
    (host / "host_fp8/_register.py").write_text(register)
    finder.add("host.core", "host_fp8._register:extend")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert importlib.import_module("host").core.VALUE == 1
        finder.extend_imported()
    (warning,) = caught
    assert "FP8 is not available through host.core" in str(warning.message)
    assert message in str(warning.message)
    assert message in finder.status["host.core"]


def test_failing_extension_does_not_raise_where_warnings_are_errors(host, finder, capsys):
    (host / "host_fp8/_register.py").write_text("def extend(module): module.MOVED")
    finder.add("host.core", "host_fp8._register:extend")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module("host").core.VALUE == 1
    assert "FP8 is not available through host.core" in capsys.readouterr().err


def test_failing_registration_is_a_warning(monkeypatch):
    def fail(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(_fp8_autoload._finder, "add", fail)
    with pytest.warns(RuntimeWarning, match="FP8 was not registered: RuntimeError: broken"):
        _fp8_autoload.load()


def test_finder_that_raises_is_left_to_the_import_system(host, finder):
    class Blocks:
        def find_spec(self, fullname, path=None, target=None):
            if fullname == "host.core":
                raise ModuleNotFoundError("blocked on purpose")

    finder.add("host.core", "host_fp8._register:extend")
    sys.meta_path.insert(1, Blocks())
    with pytest.raises(ModuleNotFoundError, match="blocked on purpose"):
        importlib.import_module("host.core")


def test_mistake_of_the_finder_itself_leaves_the_import_alone(host, finder, monkeypatch):
    def fail(loader):
        raise RuntimeError("broken")

    finder.add("host.core", "host_fp8._register:extend")
    monkeypatch.setattr(finder, "_extend_after_import", fail)
    assert importlib.import_module("host.core").VALUE == 1
