import importlib.metadata
import inspect
import os
import sys

import pytest

from tests.internals import MODULES, POINTS, autoload, hosts, import_modules

pytestmark = pytest.mark.long


UTILS = "trl.models.utils"


@pytest.fixture
def planted(tmp_path, monkeypatch, forked_python):
    """``planted(code, python)``: what is told where `code` is TRL's module that is extended."""
    folder = tmp_path / "trl" / "models"
    folder.mkdir(parents=True)
    (tmp_path / "trl" / "__init__.py").write_text("__version__ = '9.9'\n")
    (folder / "__init__.py").write_text("")
    search = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(search))
    monkeypatch.setitem(MODULES, "trl", [UTILS])

    def tell(code, python=forked_python):
        (folder / "utils.py").write_text(code)
        monkeypatch.setattr(sys, "executable", python)
        return hosts._extended("trl")

    return tell


STOCK = "def prepare_fsdp(model, accelerator): ..."
MOVED = STOCK.replace("fsdp", "fsdp2")


@pytest.mark.parametrize(
    ("code", "status", "of_module"),
    [(STOCK, "ok", "extended"), (MOVED, "failed", "has no attribute 'prepare_fsdp'")],
    ids=["holds", "moved"],
)
def test_a_module_that_is_extended_or_has_moved_is_told_by_name(planted, code, status, of_module):
    host, module = planted(code)
    assert (host.status, module.status, module.name) == (status, status, UTILS)
    assert f"{int(status == 'ok')} of 1 modules are extended" in host.detail
    assert of_module in module.detail


def test_autoload_that_is_missing_is_red_at_each_point(planted, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    host, point = planted(STOCK, sys.executable)
    assert (host.status, point.status) == ("failed", "failed")
    assert "the flag has no effect here" in point.detail


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('libcudart is missing')", "ImportError: libcudart is missing"),
        ("import sys; sys.exit('not on this machine')", "SystemExit: not on this machine"),
        ("import os; os._exit(3)", "ended the process with status 3"),
    ],
    ids=["raises", "exits", "dies"],
)
def test_a_broken_host_is_red_and_harms_nothing(planted, code, message):
    results = planted(code)
    assert results[0].status == "failed"
    assert any(message in result.detail for result in results)


def is_ours(value):
    """Return whether a function or property of a host is one of our wrappers."""
    value = value.fget if isinstance(value, property) else value
    return inspect.isfunction(value) and "_fp8_original" in vars(value)


def _extended_names(module):
    """Return the dotted names of everything with ``_fp8_original`` in a module and its classes."""
    names = []
    for name, value in list(vars(module).items()):
        if is_ours(value):
            names.append(name)
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            names += [f"{name}.{key}" for key, method in vars(value).items() if is_ours(method)]
    return sorted(names)


@pytest.mark.parametrize("host", {module.partition(".")[0]: None for module in POINTS})
def test_the_list_has_all_that_is_extended(host):
    pytest.importorskip(host)
    assert {*import_modules(MODULES[host]).values()} == {""}
    for name in MODULES[host]:
        copied = {"is_fp8_available", "prepare_fsdp"}
        extended = {*_extended_names(importlib.import_module(name))}
        assert {*POINTS[name]} == extended - (copied - {*POINTS[name]})


def test_a_host_that_is_not_installed_is_no_failure(monkeypatch):
    monkeypatch.setattr(hosts, "is_installed", lambda host: False)
    assert {(r.status, r.detail) for r in hosts.hosts()} == {("info", "not installed")}


def test_autoload_that_is_off_is_red(monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    others = [finder for finder in sys.meta_path if type(finder).__module__ != "_fp8_autoload"]
    monkeypatch.setattr(sys, "meta_path", others)
    results = autoload()
    assert [result.status for result in results[:3]] == ["ok", "failed", "failed"]
    assert "import lightning_fp8" in results[2].detail


def test_autoload_and_configuration_of_this_interpreter(monkeypatch):
    assert [result.status for result in autoload()] == ["ok", "ok", "ok", "info"]
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipe": "rowwise"}')
    assert '"rowwise"' in autoload()[-1].detail
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipee": "rowwise"}')
    assert autoload()[-1].status == "failed"


def test_an_installation_without_entry_point_is_red(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert autoload()[0].status == "failed"
    assert "not installed in this environment" in autoload()[0].detail
