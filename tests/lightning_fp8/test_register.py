import importlib
import re
import shutil
import types
from pathlib import Path
from typing import Literal, get_args

import click.testing
import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning

from tests.internals import lightning_register as _register

LATE = """
import importlib, sys
host, fabric = sys.argv[1:]
L, F = importlib.import_module(host), importlib.import_module(fabric)
cli = importlib.import_module(f"{host}.cli")
demo = importlib.import_module(f"{host}.demos.boring_classes")
import lightning_fp8
L.Trainer(accelerator="cpu", precision="fp8-mixed", logger=False)
F.Fabric(accelerator="cpu", precision="fp8-mixed")
sys.argv = ["cli.py", "fit", "--trainer.precision=fp8-mixed", "--print_config"]
cli.LightningCLI(demo.BoringModel)
"""
MOVED = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", RuntimeWarning)
    from lightning_fabric import Fabric
ours = [str(w.message) for w in caught if "FP8" in str(w.message)]
assert len(ours) == 1, ours
print(ours[0])
Fabric(accelerator="cpu", precision="bf16-mixed")
try:
    Fabric(accelerator="cpu", precision="fp8-mixed")
except ValueError as error:
    assert "Precision 'fp8-mixed' is invalid" in str(error), error
else:
    raise AssertionError("accepted")
"""


@pytest.mark.parametrize(
    "host",
    [
        lightning.pytorch.Trainer,
        pytorch_lightning.Trainer,
        lightning.Fabric,
        lightning_fabric.Fabric,
    ],
    ids=lambda host: host.__module__,
)
def test_misspelt_precision_is_refused_by_the_host_with_ours_among_the_choices(host):
    with pytest.raises(ValueError, match=r"Precision 'fp8-mixd' is invalid.*'fp8-mixed'"):
        host(accelerator="cpu", precision="fp8-mixd")


@pytest.mark.parametrize("host", ["lightning.pytorch", "pytorch_lightning"])
def test_misspelt_precision_is_refused_by_the_cli_with_ours_among_the_choices(host, capsys):
    cli = importlib.import_module(f"{host}.cli")
    model = importlib.import_module(f"{host}.demos.boring_classes").BoringModel
    with pytest.raises(SystemExit):
        cli.LightningCLI(model, args=["fit", "--trainer.precision=fp8-mixd"])
    assert "'fp8-mixed'" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_misspelt_precision_is_refused_by_fabric_run_with_ours_among_the_choices(package):
    command = importlib.import_module(f"{package}.cli")._main
    result = click.testing.CliRunner().invoke(command, ["run", "--precision=fp8-mixd", __file__])
    assert result.exit_code == 2
    assert "'fp8-mixed'" in result.output


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_choices_hold_ours_once_and_all_of_the_host(package):
    precision = importlib.import_module(f"{package}.plugins.precision.precision")
    choices = get_args(precision._PRECISION_INPUT_STR)
    assert choices.count("fp8-mixed") == 1
    assert {"32-true", "bf16-mixed", "16-mixed"} < set(choices)
    assert precision._PRECISION_INPUT_STR in get_args(precision._PRECISION_INPUT)
    _register.extend(importlib.import_module(f"{package}.connector"))
    assert get_args(precision._PRECISION_INPUT_STR) == choices


@pytest.mark.parametrize("connector", _register.PLUGINS)
def test_connectors_keep_the_original_and_are_wrapped_once(connector):
    module = importlib.import_module(connector)
    name = "_Connector" if "fabric" in connector else "_AcceleratorConnector"
    cls = getattr(module, name)
    before = cls.__init__, cls._check_and_init_precision
    _register.extend(module)
    assert (cls.__init__, cls._check_and_init_precision) == before
    for wrapped in before:
        assert wrapped._fp8_original.__module__ == connector
        assert not hasattr(wrapped._fp8_original, "_fp8_original")


@pytest.mark.long
@pytest.mark.parametrize(
    "hosts",
    [("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")],
    ids=lambda hosts: hosts[0],
)
def test_explicit_import_after_lightning_registers_where_autoload_is_off(run, hosts):
    (late,) = run(["-c", LATE, *hosts, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}])
    assert late.returncode == 0, late.output
    assert "precision: fp8-mixed" in late.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("connector.py", "_check_and_init_precision", "_choose_precision"),
        ("connector.py", "_Connector", "_FabricConnector"),
        ("plugins/precision/precision.py", "_PRECISION_INPUT_STR", "_PRECISION_STRING"),
    ],
    ids=["method", "class", "literal"],
)
def test_upstream_name_that_moved_is_one_warning_and_stock_behaviour(run, tmp_path, file, old, new):
    installed = Path(lightning_fabric.__file__).parent
    copy = shutil.copytree(
        installed, tmp_path / "site/lightning_fabric", ignore=shutil.ignore_patterns("__pycache__")
    )
    for path in copy.rglob("*.py"):
        text = path.read_text()
        if re.search(rf"\b{old}\b", text):
            path.write_text(re.sub(rf"\b{old}\b", new, text))
    assert new in (copy / file).read_text()
    code = f"import sys; sys.path.insert(0, {str(copy.parent)!r})\n{MOVED}"
    (moved,) = run(["-c", code])
    assert moved.returncode == 0, moved.output
    assert old in moved.output


def test_missing_connector_takes_the_choice_back():
    literal = Literal["bf16-mixed", "32-true"].copy_with(("bf16-mixed", "32-true", "fp8-mixed"))
    module = types.ModuleType("lightning.fabric.connector")
    module._PRECISION_INPUT_STR = literal
    with pytest.raises(AttributeError, match="_Connector"):
        _register.extend(module)
    assert get_args(literal) == ("bf16-mixed", "32-true")
