import importlib.metadata
import inspect
import os
import sys

import pytest

from tests.internals import POINTS, autoload, hosts, inspect_host, is_ours

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
    monkeypatch.setitem(POINTS, "trl", {UTILS: ("prepare_fsdp",)})

    def tell(code, python=forked_python):
        (folder / "utils.py").write_text(code)
        monkeypatch.setattr(sys, "executable", python)
        return hosts._extended("trl")

    return tell


STOCK = "def prepare_fsdp(model, accelerator): ..."
WARNS = f"import warnings\nwarnings.warn('FP8 is not tried with this version')\n{STOCK}"
ACTIVE = "9.9, 1 of 1 extension points are active"


@pytest.mark.parametrize(
    ("code", "status", "detail", "of_point"),
    [
        (STOCK, "ok", ACTIVE, ["extended"]),
        (WARNS, "ok", f"{ACTIVE}; FP8 is not tried with this version", ["extended"]),
        (
            STOCK.replace("fsdp", "fsdp2"),
            "failed",
            ACTIVE.replace("1 of", "0 of"),
            ["does not exist in this version", "AttributeError"],
        ),
    ],
    ids=["holds", "warns", "moved"],
)
def test_a_point_that_took_hold_or_moved_is_told_by_name(planted, code, status, detail, of_point):
    host, point = planted(code)
    assert (host.status, host.detail) == (status, detail)
    assert (point.name, point.status) == (f"{UTILS}:prepare_fsdp", status)
    assert all(words in point.detail for words in of_point)


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


def _extended_names(module):
    """Return the dotted names of everything with ``_fp8_original`` in a module and its classes."""
    names = []
    for name, value in list(vars(module).items()):
        if is_ours(value):
            names.append(name)
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            names += [f"{name}.{key}" for key, method in vars(value).items() if is_ours(method)]
    return sorted(names)


@pytest.mark.parametrize("host", POINTS)
def test_the_list_has_all_that_is_extended(host):
    pytest.importorskip(host)
    lines = inspect_host(list(POINTS[host]))["lines"]
    assert {line["detail"] for line in lines} == {"extended"}
    assert [line["name"] for line in lines] == [
        f"{m}:{n}" for m, of in POINTS[host].items() for n in of
    ]
    for name, points in POINTS[host].items():
        of_functions = sorted(set(points) - {"_PRECISION_INPUT_STR"})
        assert _extended_names(importlib.import_module(name)) == of_functions


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
