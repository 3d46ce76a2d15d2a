"""FP8 that was asked for and does not run is never silent, whatever the reason."""

import os
import sys
import textwrap

import pytest

import _fp8_autoload
import _fp8_check
from tests.processes import ran

PYTHON = ""
START = "FP8 was requested by "
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_USE_CPU": "true"}
LAUNCHER = START + "accelerate launch --mixed_precision fp8 (ACCELERATE_MIXED_PRECISION)"

MODEL = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters())
def train(steps=2):
    for _ in range(steps):
        model(torch.randn(16, 64)).sum().backward()
        optimizer.step()
"""
ACCELERATOR = """
from accelerate import Accelerator
accelerator = Accelerator({})
model, optimizer = accelerator.prepare(model, optimizer)
train()
"""


@pytest.fixture(autouse=True)
def _python(forked_python, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PYTHON", forked_python)


def run(code, **environment):
    """The warnings about absent FP8 that a script of this `code` logs."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    done = ran(PYTHON, "-W", "ignore", "-c", code, env=inherited, **environment)
    return [line for line in done.stderr.splitlines() if START in line]


def test_loop_without_an_accelerator_is_told_once():
    (line,) = run(MODEL + "train(); train()", **LAUNCHED)
    assert line.startswith(f"{LAUNCHER}, but this process trains without any FP8 layer: it has no")
    assert line.endswith("call torch_fp8.convert_to_float8(model)")


def test_loop_that_converts_by_hand_is_told_nothing():
    convert = "import torch_fp8; torch_fp8.convert_to_float8(model)\n"
    assert run(MODEL + convert + "train()", TORCH_FP8_CONFIG="{}") == []


def test_model_that_another_library_has_quantized_is_told_by_its_summary():
    theirs = """
    linear = type("Linear4bit", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    weight = type("Params4bit", (torch.nn.Parameter,), {"quant_type": "nf4"})
    for layer in model:
        layer.__class__ = linear
        layer._parameters["weight"] = weight(layer.weight.detach())
    optimizer = torch.optim.AdamW(model.parameters())
    """
    assert run(MODEL + textwrap.dedent(theirs) + ACCELERATOR.format(""), **LAUNCHED) == []


def test_nothing_asked_for_imports_nothing_and_registers_no_hook():
    code = """
    import sys
    train()
    from torch.optim import optimizer
    assert "_fp8_check" not in sys.modules and not optimizer._global_optimizer_pre_hooks
    """
    assert run(MODEL + textwrap.dedent(code), ACCELERATE_MIXED_PRECISION="bf16") == []


def test_compiled_optimizer_step_is_no_trouble():
    code = "torch.compile(optimizer.step, backend='eager')"
    assert len(run(MODEL + f"train(0); {code}(); train(1)", **LAUNCHED)) == 1


def test_argument_that_won_over_the_launcher_is_named():
    # As diffusers' train_unconditional.py, whose --mixed_precision is "no" by default.
    (line,) = run(MODEL + ACCELERATOR.format("mixed_precision='no'"), **LAUNCHED)
    assert "its Accelerator was made with mixed_precision='no'" in line
    assert "pass 'fp8' there" in line


def test_accelerator_with_fp8_is_told_nothing():
    assert run(MODEL + ACCELERATOR.format(""), **LAUNCHED) == []


@pytest.mark.parametrize(
    ("variable", "loop", "found"),
    [
        ("PL_TRAINER_PRECISION", "Trainer(precision='32-true', accelerator='cpu')", "32-true"),
        pytest.param(
            "PL_FIT__TRAINER__PRECISION",
            "Fabric(accelerator='cpu')",
            "32-true",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_argument_that_won_over_lightnings_environment_is_named(variable, loop, found):
    where = "lightning.pytorch" if "Trainer" in loop else "lightning.fabric"
    code = f"{MODEL}\nfrom {where} import *\nloop = {loop}\ntrain()"
    (line,) = run(code, **{variable: "fp8-mixed"})
    assert line.startswith(f"{START}{variable}=fp8-mixed")
    assert f"runs precision='{found}'" in line


@pytest.fixture
def ask(monkeypatch, caplog):
    """``ask(**environment)``: what the first step of an optimizer says here, without FP8 layers."""
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "PL_", "LT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(_fp8_check, "_has_fp8_layer", lambda: False)
    monkeypatch.setattr(_fp8_check, "_accelerator_precision", lambda: None)
    monkeypatch.setattr(_fp8_check, "_loops_of_lightning", lambda: iter(()))
    monkeypatch.setattr(_fp8_autoload._finder, "status", {})

    def asked(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        hook = _fp8_check._FirstStep()
        hook(None, (), {})
        hook(None, (), {})
        return [record.getMessage() for record in caplog.records]

    return asked


def test_only_rank_zero_tells(ask):
    assert ask(**LAUNCHED, RANK="1") == []


def test_configuration_alone_asks_for_nothing(ask):
    (line,) = ask(TORCH_FP8_CONFIG="{}")
    assert "TORCH_FP8_CONFIG sets how FP8 runs, but does not turn it on" in line


def test_variable_that_was_overwritten_meanwhile_is_remembered(ask, monkeypatch):
    # As transformers 4 does with the launcher's under bf16=True.
    monkeypatch.setattr(_fp8_check, "_accelerator_precision", lambda: "bf16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    hook = _fp8_check._FirstStep()
    monkeypatch.setattr(_fp8_check, "_FirstStep", lambda: hook)
    (line,) = ask(ACCELERATE_MIXED_PRECISION="bf16")
    assert line.startswith(LAUNCHER)
    assert "mixed_precision='bf16'" in line


def test_lightnings_environment_without_lightning_is_told(ask):
    (line,) = ask(PL_FIT__TRAINER__PRECISION="fp8-mixed")
    assert line.startswith(f"{START}PL_FIT__TRAINER__PRECISION=fp8-mixed, but")
    assert "it has neither a Trainer nor a Fabric" in line


def test_model_that_was_not_prepared_is_named(ask, monkeypatch):
    monkeypatch.setattr(_fp8_check, "_accelerator_precision", lambda: "fp8")
    (line,) = ask()
    assert line.startswith(f"{START}Accelerator(mixed_precision='fp8'), but")
    assert "no model with linear layers was passed to Accelerator.prepare" in line


def test_backend_that_converted_nothing_is_named(ask, monkeypatch):
    monkeypatch.setattr(_fp8_check, "_accelerator_precision", lambda: "fp8")
    (line,) = ask(**LAUNCHED, ACCELERATE_FP8_BACKEND="TE")
    assert "--fp8_backend te was chosen, but converted nothing" in line


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ("AttributeError: moved", "could not be extended (AttributeError: moved)"),
        ("waiting", "was imported without going through torch-fp8's finder"),
    ],
)
def test_host_that_is_not_extended_is_named(ask, monkeypatch, status, message):
    import accelerate

    name = "accelerate.accelerator"
    monkeypatch.setattr(_fp8_autoload._finder, "status", {name: status})
    (line,) = ask(**LAUNCHED)
    assert message in line
    of_version = f" of accelerate {accelerate.__version__}"
    assert name + (of_version if "moved" in status else "") in line
