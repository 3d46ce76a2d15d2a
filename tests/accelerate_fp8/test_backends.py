"""Which backend runs FP8: torchao, Transformer Engine or MS-AMP where chosen, else ours."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_fp8 import FP8Config, FP8Kwargs

SCRIPTS = Path(__file__).parent / "scripts"


def _model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])


def _prepared_layer(accelerator: Any) -> str:
    model = accelerator.prepare(_model())
    model(torch.randn(16, 32)).sum().backward()
    return type(model[1]).__module__.split(".")[0]


def test_engine_runs_where_torchao_is_installed(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=True)
    assert accelerate.utils.is_torchao_available()
    assert accelerator.fp8_backend == "TORCH_FP8"
    assert _prepared_layer(accelerator) == "torch_fp8"


@pytest.mark.parametrize("spelling", ["ao", "AO"])
def test_backend_variable_chooses_torchao(
    accelerate: Any, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", spelling)
    accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=True)
    assert accelerator.fp8_backend == "AO"
    assert _prepared_layer(accelerator) == "torchao"


def test_configuration_of_ours_beside_another_backend_is_warned_about(
    accelerate: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "ao")
    monkeypatch.setenv("TORCH_FP8_CONFIG", '{"recipe": "rowwise"}')
    accelerate.Accelerator(mixed_precision="fp8", cpu=True)
    assert caplog.text.count("TORCH_FP8_CONFIG is not applied") == 1


def test_recipe_handler_chooses_torchao(accelerate: Any) -> None:
    handlers = [accelerate.utils.AORecipeKwargs()]
    accelerator = accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=handlers, cpu=True)
    assert _prepared_layer(accelerator) == "torchao"


def test_backend_variable_chooses_msamp(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "msamp")
    assert accelerate.Accelerator(mixed_precision="fp8", cpu=True).fp8_backend == "MSAMP"


def test_missing_transformer_engine_is_accelerates_own_error(
    accelerate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    with pytest.raises(ImportError, match="TransformerEngine is not available"):
        accelerate.Accelerator(mixed_precision="fp8", cpu=True)


def test_unknown_backend_is_accelerates_own_error(
    accelerate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "apex")
    with pytest.raises(ValueError, match="apex"):
        accelerate.Accelerator(mixed_precision="fp8", cpu=True)


@pytest.mark.parametrize("backend", ["NO", "TORCH_FP8", "torch_fp8"])
def test_backend_variable_may_name_the_engine(
    accelerate: Any, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=True)
    assert _prepared_layer(accelerator) == "torch_fp8"


def test_backend_flag_beside_fp8_kwargs_is_refused(
    accelerate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "ao")
    with pytest.raises(ValueError, match=r"FP8Kwargs .* --fp8_backend ao .* leave one out"):
        accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=[FP8Kwargs(FP8Config())])


def test_recipe_handler_beside_fp8_kwargs_is_refused(accelerate: Any) -> None:
    handlers = [FP8Kwargs(FP8Config()), accelerate.utils.AORecipeKwargs()]
    with pytest.raises(ValueError, match=r"FP8Kwargs .* AORecipeKwargs .* leave one out"):
        accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=handlers)


@pytest.mark.long
def test_launcher_flag_in_lower_case_runs_torchao(run: Callable) -> None:
    done = run("loop.py", launch=("--mixed_precision", "fp8", "--fp8_backend", "ao"))
    assert "layer torchao.float8" in done.stdout
    assert done.fp8 == 0


@pytest.mark.long
def test_config_file_of_torchao_runs_torchao(run: Callable, tmp_path: Path) -> None:
    config = tmp_path / "accelerate.yaml"
    text = (SCRIPTS / "config_file.yaml").read_text()
    config.write_text(text.split("fp8_config:")[0] + "fp8_config:\n  backend: AO\n")
    done = run("loop.py", launch=("--config_file", str(config)))
    assert "layer torchao.float8" in done.stdout


@pytest.mark.long
def test_config_file_without_backend_runs_the_engine(run: Callable, tmp_path: Path) -> None:
    config = shutil.copy(SCRIPTS / "config_file.yaml", tmp_path)
    done = run("loop.py", launch=("--config_file", str(config)))
    assert done.fp8 > 0
    assert "recipe    delayed" in done.stderr


@pytest.mark.long
def test_engine_runs_without_any_fp8_library(run: Callable, hidden_torchao: Path) -> None:
    done = run("loop.py", launch=("--mixed_precision", "fp8"), before=hidden_torchao)
    assert done.fp8 > 0


@pytest.mark.long
def test_hidden_torchao_is_what_stock_accelerate_misses(
    run: Callable, hidden_torchao: Path
) -> None:
    """The control of the test above: stock Accelerate refuses the flag in that environment."""
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run("loop.py", "fp8", fails=True, before=hidden_torchao, **off)
    assert "Using `fp8` precision requires" in done.stderr
