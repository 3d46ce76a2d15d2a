import importlib

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning
import torch
from torch import nn

import _fp8_points
from lightning_fp8 import FP8Config, FP8Precision
from tests.internals import lightning_register as _register

HOSTS = [
    lightning.pytorch.Trainer,
    pytorch_lightning.Trainer,
    lightning.fabric.Fabric,
    lightning_fabric.Fabric,
]
each_host = pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__module__)


@pytest.fixture
def too_old(monkeypatch):
    monkeypatch.setattr(_fp8_points, "version", lambda name: "2.2.5")


@pytest.mark.parametrize("connector", _register.PLUGINS)
@pytest.mark.usefixtures("too_old")
def test_an_old_lightning_says_so_when_it_is_asked_for_fp8(connector, monkeypatch):
    module = importlib.import_module(connector)
    name = "_Connector" if "fabric" in connector else "_AcceleratorConnector"
    made = []

    class Old:
        def __init__(self, **kwargs):
            made.append(kwargs)

    monkeypatch.setattr(module, name, Old)
    for _ in range(2):
        _register.extend(module)
    Old(precision="bf16-mixed", plugins=None, strategy="auto")
    package = connector.partition(".")[0].replace("_", "-")
    line = rf"supports {package} [\d.]+ to [\d.]+, found 2.2.5: pip install '{package}>=[\d.]+'"
    with pytest.raises(ImportError, match=line):
        Old(precision="fp8-mixed")
    with pytest.raises(ImportError, match="or train without FP8"):
        Old(plugins=[FP8Precision()])
    assert len(made) == 1


@each_host
@pytest.mark.parametrize("given", ["fp8", "FP8", "fp8-true", "fp8_mixed", "float8"])
def test_a_precision_that_is_nearly_ours_is_recognized(host, given):
    with pytest.raises(ValueError, match=f"'{given}' is unknown; did you mean 'fp8-mixed'"):
        host(accelerator="cpu", precision=given)


def test_fields_of_the_configuration_are_accepted():
    assert FP8Precision(recipe="rowwise").config == FP8Config(recipe="rowwise")
    fabric = lightning.fabric.Fabric(accelerator="cpu", plugins=[FP8Precision(recipe="rowwise")])
    assert fabric.strategy.precision.config.recipe == "rowwise"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((FP8Config(),), {"recipe": "rowwise"}, ValueError, "got both: .* and recipe; put recipe"),
        (("rowwise",), {}, TypeError, r"did you mean FP8Precision\(recipe='rowwise'\)"),
        ((), {"recipes": "rowwise"}, TypeError, "recipes"),
    ],
)
def test_other_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        FP8Precision(*arguments, **options)


@pytest.mark.parametrize("package", [lightning.fabric, lightning_fabric])
def test_the_summary_names_each_of_two_models(package, log):
    class Generator(nn.Sequential):
        pass

    class Critic(nn.Sequential):
        pass

    fabric = package.Fabric(accelerator="cpu", precision="fp8-mixed")
    for cls in (Generator, Critic):
        model = cls(nn.Linear(64, 64))
        fabric.setup(model, torch.optim.AdamW(model.parameters()))
    lines = [line.split() for line in log().splitlines()]
    assert [words[1] for words in lines if words[:1] == ["model"]] == ["Generator", "Critic"]
