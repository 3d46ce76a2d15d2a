import importlib
import types
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


@pytest.mark.parametrize(
    "moved", ["_PRECISION_INPUT_STR", "_Connector", "_check_and_init_precision"]
)
def test_a_name_that_moved_upstream_leaves_the_host_without_our_choice(moved):
    """With one warning, as `tests/test_autoload.py` has it of any extension that raises."""

    class Connector:
        def __init__(self): ...

        def _check_and_init_precision(self): ...

    literal = Literal["bf16-mixed", "32-true"].copy_with(("bf16-mixed", "32-true", "fp8-mixed"))
    module = types.ModuleType("lightning.fabric.connector")
    vars(module).update(_PRECISION_INPUT_STR=literal, _Connector=Connector)
    delattr(module if hasattr(module, moved) else Connector, moved)
    before = dict(vars(Connector))
    with pytest.raises(AttributeError, match=moved):
        _register.extend(module)
    assert dict(vars(Connector)) == before
    if moved != "_PRECISION_INPUT_STR":  # of a host that has none, nothing was changed before
        assert get_args(literal) == ("bf16-mixed", "32-true")
