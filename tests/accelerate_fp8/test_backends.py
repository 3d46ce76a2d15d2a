import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate_fp8 import FP8Config, FP8Kwargs

SCRIPTS = Path(__file__).parent / "scripts"


def _model():
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])


def _prepared_layer(accelerator):
    model = accelerator.prepare(_model())
    model(torch.randn(16, 32)).sum().backward()
    return type(model[1]).__module__.split(".")[0]


OURS, TORCHAO = ("TORCH_FP8", "torch_fp8"), ("AO", "torchao")


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [
        (None, OURS),
        ("NO", OURS),
        ("TORCH_FP8", OURS),
        ("torch_fp8", OURS),
        ("ao", TORCHAO),
        ("AO", TORCHAO),
    ],
)
def test_backend_variable_chooses(accelerate, monkeypatch, variable, chosen):
    """This engine runs unless another is named, though torchao is installed."""
    assert accelerate.utils.is_torchao_available()
    if variable is not None:
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", variable)
    accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=True)
    assert (accelerator.fp8_backend, _prepared_layer(accelerator)) == chosen


def test_our_configuration_beside_another_backend_is_warned_about(accelerate, monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "ao")
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipe": "rowwise"}')
    accelerate.Accelerator(mixed_precision="fp8", cpu=True)
    assert caplog.text.count("TORCH_FP8_CONFIG is not applied") == 1


def test_recipe_handler_chooses_torchao(accelerate):
    handlers = [accelerate.utils.AORecipeKwargs()]
    accelerator = accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=handlers, cpu=True)
    assert _prepared_layer(accelerator) == "torchao"


@pytest.mark.parametrize(
    ("variable", "error", "message"),
    [("te", ImportError, "TransformerEngine is not available"), ("apex", ValueError, "apex")],
)
def test_other_backends_have_accelerates_errors(accelerate, monkeypatch, variable, error, message):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", variable)
    with pytest.raises(error, match=message):
        accelerate.Accelerator(mixed_precision="fp8", cpu=True)


@pytest.mark.parametrize("flag", [True, False])
def test_another_backend_beside_fp8_kwargs_is_refused(accelerate, monkeypatch, flag):
    handlers, named = [FP8Kwargs(FP8Config())], "--fp8_backend ao"
    if flag:
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "ao")
    else:
        handlers.append(accelerate.utils.AORecipeKwargs())
        named = "AORecipeKwargs"
    with pytest.raises(ValueError, match=rf"FP8Kwargs .* {named} .* leave one out"):
        accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=handlers)


@pytest.mark.long
def test_config_file_without_backend_runs_the_engine(run, tmp_path):
    config = shutil.copy(SCRIPTS / "config_file.yaml", tmp_path)
    done = run("loop.py", launch=("--config_file", str(config)))
    assert done.fp8 > 0
    assert "recipe    delayed" in done.stderr


@pytest.mark.long
def test_engine_runs_without_any_fp8_library(run, hidden_torchao):
    done = run("loop.py", launch=("--mixed_precision", "fp8"), before=hidden_torchao)
    assert done.fp8 > 0
