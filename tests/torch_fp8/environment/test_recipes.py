"""The self-test's checks of recipes, of exchanges and of training steps: what is wrong is told."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from torch_fp8 import FP8Config
from torch_fp8.environment import exchange, host_steps, recipes
from torch_fp8.environment.hosts import child_environment
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.ops import refused_rows
from torch_fp8.quantization.formats import E5M2
from torch_fp8.quantization.recipe import RECIPES, make_recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_reaches_its_floors(recipe):
    assert "emulated" in recipes.check_gemms(recipe)


@pytest.mark.parametrize("operand", ["input", "grad_output"])
def test_a_gemm_in_the_wrong_format_is_told(operand, monkeypatch):
    """E5M2 where E4M3 is right."""

    def configure(layer, name, config, recipe, emulate):
        spec = getattr(recipe, operand)._replace(format=E5M2)
        a = dataclasses.replace
        if operand == "input":
            recipe = a(recipe, fprop=a(recipe.fprop, a=spec), wgrad=a(recipe.wgrad, b=spec))
        else:
            recipe = a(recipe, dgrad=a(recipe.dgrad, a=spec), wgrad=a(recipe.wgrad, a=spec))
        original(layer, name, config, recipe, emulate)

    original = Float8Linear.configure
    monkeypatch.setattr(Float8Linear, "configure", configure)
    gemm = "fprop" if operand == "input" else "dgrad"
    with pytest.raises(RuntimeError, match=f"{gemm} is below its floor of 28.0 dB"):
        recipes.check_gemms("rowwise")


def test_a_wrong_scale_of_one_row_is_told(monkeypatch):
    """The whole hides one row of 384; its own SQNR does not."""

    class Wrong(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            y = self.layer(x)
            return torch.cat([y[:1] * 1.08, y[1:]])

    original = recipes._measured
    monkeypatch.setattr(
        recipes, "_measured", lambda layer, run, recipe: original(layer, Wrong(layer), recipe)
    )
    with pytest.raises(RuntimeError, match=r"\(row 2\d"):
        recipes.check_gemms("tensorwise")


def test_a_compiled_layer_is_one_graph():
    assert "2 graphs for 2 shapes, 0 breaks" in recipes.check_compiled("tensorwise")


def test_a_break_in_a_compiled_layer_is_told(monkeypatch):
    def forward(self, x):
        torch._dynamo.graph_break("planted")
        return original(self, x)

    original = Float8Linear.forward
    monkeypatch.setattr(Float8Linear, "forward", forward)
    with pytest.raises(RuntimeError, match="graph_break"):
        recipes.check_compiled("tensorwise")


@pytest.mark.parametrize("recipe", [*RECIPES, "frozen"])
def test_a_wrong_output_of_one_token_is_told(recipe, monkeypatch):
    """By 8 %, 22 dB: once in training and once where the token is decoded."""
    check, *given = (
        (recipes.check_frozen,) if recipe == "frozen" else (recipes.check_few_tokens, recipe)
    )
    assert "99, 16, 1 tokens and one decoded" in check(*given)
    original = Float8Linear.forward
    for training in (True, False):

        def wrong(self, x, training=training):
            y = original(self, x)
            return y * 1.08 if len(x) == 1 and self.training == training else y

        monkeypatch.setattr(Float8Linear, "forward", wrong)
        with pytest.raises(
            RuntimeError, match=r"fprop of 1 tokens has 2\d\.\d dB, its floor is 25"
        ):
            check(*given)


def test_sizes_that_a_card_refuses_are_told(monkeypatch):
    monkeypatch.setattr(refused_rows, "padded", {"a size": 128})
    assert "refused sizes of GEMMs that run padded: 1" in recipes.check_frozen()


def test_floors_follow_the_formats():
    mixed = make_recipe("tensorwise")
    assert [recipes.floor_db(gemm) for gemm in mixed.gemms] == [28.0, 24.0, 24.0]
    assert [recipes.floor_db(gemm) for gemm in make_recipe("mxfp8").gemms] == [28.0] * 3


def test_averages_that_are_wrong_are_told():
    ours, theirs = torch.randn(2, 4096)
    mean = (ours + theirs) / 2
    assert "equal on all ranks" in exchange.verdict([mean, mean], [ours, theirs])
    with pytest.raises(RuntimeError, match="below its floor"):
        exchange.verdict([ours + theirs] * 2, [ours, theirs])
    with pytest.raises(RuntimeError, match="different averages"):
        exchange.verdict([mean, mean * 1.0001], [ours, theirs])


@pytest.mark.slow
def test_two_processes_exchange_gradients():
    assert "over gloo" in exchange.check_exchange()


@pytest.mark.parametrize("level", host_steps.LEVELS)
def test_a_step_of_each_level_is_told_from_the_others(level, tmp_path):
    """Through Accelerate, the lightest; a level that runs as another one is told."""
    pytest.importorskip("accelerate")
    assert "2 FP8 layers" in host_steps.step("Accelerate", level)
    other = {"O1": "O2", "O2": "O3", "O3": "O1"}[level]
    evidence = host_steps.Evidence()
    loss = host_steps.run("Accelerate", other, evidence, str(tmp_path))
    with pytest.raises(RuntimeError, match=f"weights at level {level} have the wrong kind"):
        evidence.verdict(level, loss)


@pytest.mark.long
def test_a_step_without_autoload_is_told():
    """The flag itself is what a step is made with."""
    code = "from torch_fp8.environment.host_steps import step; step('Lightning Fabric', 'O1')"
    environment = {**child_environment(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "fp8-mixed" in done.stderr.splitlines()[-1]


def test_a_flag_that_is_silently_off_is_told():
    evidence = host_steps.Evidence()
    model = torch.nn.Linear(8, 8)
    model(torch.randn(2, 8)).sum().backward()
    evidence.look(model)
    with pytest.raises(RuntimeError, match="the flag has no effect"):
        evidence.verdict("O1", 1.0)


@pytest.mark.parametrize(("loss", "message"), [(float("nan"), "loss is nan"), (1.0, "no weight")])
def test_a_step_that_did_nothing_is_told(loss, message):
    from torch_fp8 import convert_to_float8

    evidence = host_steps.Evidence()
    model = torch.nn.Linear(16, 16)
    convert_to_float8(model, FP8Config(recipe="tensorwise"))
    model(torch.randn(16, 16)).sum().backward()
    evidence.look(model)
    with pytest.raises(RuntimeError, match=message):
        evidence.verdict("O1", loss)


def test_a_layer_that_does_not_run_in_fp8_fails():
    layer, _ = recipes._layer("rowwise")
    with pytest.raises(RuntimeError, match="ran without"):
        recipes._measured(layer, lambda x: torch.nn.functional.linear(x, layer.weight), "rowwise")
