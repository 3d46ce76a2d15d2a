import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import _fp8_autoload
from _fp8_points import POINTS
from tests.internals import accelerate_register as _register

OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}


@pytest.mark.long
def test_without_autoload_accelerate_is_stock(run):
    done = run("explicit_import.py", "never", **OFF, **FP8)
    assert "layer torchao.float8.float8_linear arguments bf16" in done.stdout
    assert "engine imported False" in done.stdout
    assert done.fp8 == 0


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_explicit_import_restores_the_engine(run, when, hidden_torchao):
    before = hidden_torchao if when == "before" else None
    done = run("explicit_import.py", when, before=before, **OFF, **FP8)
    assert "layer torch_fp8.nn.linear arguments fp8" in done.stdout
    assert done.fp8 > 0


@pytest.mark.long
def test_moved_upstream_name_is_one_warning_and_stock_behaviour(run):
    done = run("explicit_import.py", "broken", **OFF, **FP8)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("warnings")]
    assert line.count("FP8 is not available through accelerate.accelerator") == 1
    assert line.count("FP8 is not available") == 1
    assert "_prepare_fsdp2" in line
    assert "layer torchao.float8.float8_linear" in done.stdout


@pytest.mark.long
def test_run_in_bf16_imports_nothing_of_the_engine(run):
    done = run("explicit_import.py", "never", "bf16")
    assert "layer torch.nn.modules.linear arguments bf16" in done.stdout
    assert "engine imported False" in done.stdout


@pytest.mark.parametrize(
    ("host", "missing"),
    [
        ("accelerate.accelerator", "prepare_model"),
        ("accelerate.accelerator", "prepare_optimizer"),
        ("accelerate.accelerator", "_prepare_fsdp2"),
        ("accelerate.accelerator", "fp8_backend"),
        ("transformers.trainer", "_load_optimizer_and_scheduler"),
    ],
)
def test_all_methods_of_a_class_are_extended_or_none(host, missing):
    names = [name.rpartition(".")[2] for name in POINTS[host] if not name.endswith("__init__")]
    methods: dict[str, Any] = {
        name: property(lambda self: None) if name == "fp8_backend" else lambda self: None
        for name in names
        if name != missing
    }
    class_name = "Accelerator" if host.startswith("accelerate") else "Trainer"
    cls = type(class_name, (), dict(methods))
    module = ModuleType(host)
    setattr(module, class_name, cls)
    with pytest.raises(AttributeError, match=missing):
        _register.extend(module)
    assert all(cls.__dict__[name] is method for name, method in methods.items())


@pytest.mark.parametrize("module", [name for name in POINTS if "lightning" not in name])
def test_extending_twice_changes_nothing(module):
    import importlib

    host = importlib.import_module(module)

    def wrapped():
        classes = [value for value in vars(host).values() if isinstance(value, type)]
        holders = [host, *(cls for cls in classes if cls.__module__ == module)]
        return [
            value
            for holder in holders
            for value in vars(holder).values()
            if hasattr(getattr(value, "fget", value), "_fp8_original")
        ]

    before = wrapped()
    assert before
    _register.extend(host)
    assert wrapped() == before
    for value in before:
        original = getattr(value, "fget", value)._fp8_original
        assert not hasattr(original, "_fp8_original")


def test_trainers_of_trl_that_were_imported_before_get_the_extended_function(monkeypatch):
    def prepare_fsdp(model, accelerator):
        return model

    prepare_fsdp.__module__ = "trl.models.utils"
    leaf, trainer, other = (ModuleType(n) for n in ("trl.models.utils", "trl.trainer.x", "mine"))
    for module in (leaf, trainer, other):
        module.prepare_fsdp = prepare_fsdp  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    _register.extend(leaf)
    assert trainer.prepare_fsdp is leaf.prepare_fsdp is not prepare_fsdp
    assert leaf.prepare_fsdp._fp8_original is prepare_fsdp
    assert other.prepare_fsdp is prepare_fsdp
    accelerator = SimpleNamespace(state=None)  # one without this engine
    assert leaf.prepare_fsdp("model", accelerator) == "model"
    assert leaf.prepare_fsdp("model", accelerator=accelerator) == "model"
    with pytest.raises(AttributeError, match="prepare_fsdp"):
        _register.extend(ModuleType("trl.models.utils"))


def test_construction_is_a_second_occasion_to_extend(accelerate, monkeypatch):
    """Accelerate is half imported when torch calls us; nothing may be imported after it."""
    calls = []
    monkeypatch.setattr(_fp8_autoload, "load", lambda *args: calls.append(args))
    accelerate.Accelerator(cpu=True)
    assert calls
    assert set(calls) == {("accelerate_fp8",)}


@pytest.mark.parametrize("package", ["accelerate_fp8", "torch_fp8"])
@pytest.mark.parametrize("name", ["RoutingRecord", "routing_replay"])
def test_routing_replay_is_refused_by_name(package, name):
    with pytest.raises(ImportError, match=f"torch_fp8.{name} was removed: no measurement showed"):
        exec(f"from {package} import {name}")
