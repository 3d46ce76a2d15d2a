"""What FP8 says on a card where Triton cannot compile its C module."""

import importlib
import sysconfig

import pytest
import torch
from triton import knobs
from triton.runtime import build, driver

from tests.internals import versions
from torch_fp8 import convert_to_float8
from torch_fp8.ops.hardware import PACKAGES, check_driver, missing_tools

CUDA = torch.device("cuda")


C_MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "stub"};
PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&module); }
"""


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A Hopper card with an empty cache; Triton's own code compiles and caches a smaller module."""
    module = importlib.import_module("triton.runtime.driver")  # the package has another of its name
    create = lambda: build.compile_module_from_src(C_MODULE, "stub")  # noqa: E731
    monkeypatch.setattr(module, "_create_driver", create)
    if hasattr(build, "_find_compiler"):  # Triton 3.8 remembers the compiler of the process
        monkeypatch.setattr(build, "_find_compiler", build._find_compiler.__wrapped__)
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", None)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100")
    monkeypatch.delenv("CC", raising=False)


def _no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")


def _no_such_compiler(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")


def _no_header(monkeypatch):
    paths = {**sysconfig.get_paths(), "include": "/no/include"}
    monkeypatch.setattr(sysconfig, "get_paths", lambda *args, **kwargs: paths)


FAULTS = [
    pytest.param(_no_compiler, "there is no C compiler", id="no compiler"),
    pytest.param(_no_such_compiler, "CC='no-such-compiler' names no program", id="wrong CC"),
    pytest.param(_no_header, r"there is no Python\.h in /no/include", id="no Python.h"),
]


@pytest.mark.parametrize(("fault", "said"), FAULTS)
def test_what_is_missing_is_named_with_its_packages(card, monkeypatch, fault, said):
    fault(monkeypatch)
    with pytest.raises(ValueError, match=rf"{said}.*apt-get install {PACKAGES}"):
        convert_to_float8(torch.nn.Linear(16, 16), "tensorwise", device="cuda")
    (row,) = [row for row in versions() if row.name == "C compiler"]
    assert row.status == "failed"
    assert PACKAGES in row.detail


@pytest.mark.parametrize(("fault", "said"), FAULTS)
def test_a_warm_cache_needs_no_compiler(card, monkeypatch, fault, said):
    check_driver(CUDA)
    driver._active = driver._default = None  # as in the next process
    fault(monkeypatch)
    check_driver(CUDA)


def test_a_cache_that_cannot_be_written_is_named(card, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"file/cache.*TRITON_CACHE_DIR"):
        check_driver(CUDA)


@pytest.mark.parametrize(("fault", "said"), FAULTS)
def test_without_a_card_nothing_fails(monkeypatch, fault, said):
    fault(monkeypatch)
    check_driver(torch.device("cpu"))
    (row,) = [row for row in versions() if row.name == "C compiler"]
    assert row.status == "info"
    assert PACKAGES in row.detail


def test_a_missing_libcuda_is_named(card, monkeypatch):
    module = importlib.import_module("triton.runtime.driver")

    def look_up():
        raise AssertionError("libcuda.so cannot found!\n")

    monkeypatch.setattr(module, "_create_driver", look_up)
    with pytest.raises(ValueError, match=r"libcuda\.so cannot found.*TRITON_LIBCUDA_PATH"):
        check_driver(CUDA)


def test_nothing_is_missing_where_the_tests_run():
    assert missing_tools() == []
