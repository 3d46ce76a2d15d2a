"""A model that has trained at O2 or O3 and left is a stock model to every tool that takes one."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.torch_fp8.compile.test_exported_graphs import SLOW, TRACERS
from tests.torch_fp8.converted_models import KINDS, SIZE, stock_and_converted
from torch_fp8 import FP8Config, convert_optimizer, restore_weights, revert

STOCK_ALONE = """
import io, sys, torch
module, x = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False)
assert not [name for name in sys.modules if name.startswith(("torch_fp8", "_fp8"))]
torch.save(module(x), sys.stdout.buffer)
"""


def _x():
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))


def _pair(kind, level="O3", recipe="tensorwise"):
    stock, model = stock_and_converted(kind, recipe)
    if kind != "frozen":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        convert_optimizer(optimizer, FP8Config(recipe=recipe, opt_level=level), model=model)
        for _ in range(2):
            model(_x()).float().square().mean().backward()
            optimizer.step()
        restore_weights(optimizer)
    revert(model)
    stock.load_state_dict(model.state_dict())
    return stock.eval(), model.eval()


def _exported(model):
    return torch.export.export(model, (_x(),)).module()


def _quantized(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def _elsewhere(model):
    """The model in a process without this package."""

    def run(x):
        file = io.BytesIO()
        torch.save((model, x), file)
        environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, "-c", STOCK_ALONE]
        done = subprocess.run(
            command, input=file.getvalue(), env=environment, stdout=subprocess.PIPE, check=True
        )
        return torch.load(io.BytesIO(done.stdout))

    return run


TOOLS = {
    **TRACERS,
    "export": _exported,
    "jit.script": torch.jit.script,
    "quantize_dynamic": _quantized,
}
SLOW_TOOLS = {"onnx": SLOW["onnx"], "onnx of jit": SLOW["onnx of jit"], "elsewhere": _elsewhere}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("kind", ["linear", "SwiGLU"])
def test_a_tool_takes_it_as_the_stock_model(kind, tool):
    stock, left = _pair(kind)
    assert torch.equal(TOOLS[tool](left)(_x()), TOOLS[tool](stock)(_x()))


@pytest.mark.long
@pytest.mark.parametrize("tool", SLOW_TOOLS)
def test_it_leaves_the_process(tool):
    stock, left = _pair("linear", "O2")
    torch.testing.assert_close(SLOW_TOOLS[tool](left)(_x()), stock(_x()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_ours_is_left(kind):
    stock, left = _pair(kind, "O2", "delayed")
    for ours, theirs in zip(left.modules(), stock.modules(), strict=True):
        assert type(ours) is type(theirs)
        assert ours.__dict__.keys() == theirs.__dict__.keys()
    for ours, theirs in zip(left.parameters(), stock.parameters(), strict=True):
        assert type(ours) is nn.Parameter
        assert (ours.dtype, vars(ours)) == (theirs.dtype, vars(theirs))
        assert not ours._backward_hooks
        assert not ours._post_accumulate_grad_hooks
    assert torch.equal(left(_x()), stock(_x()))


def test_a_script_of_fp8_layers_is_refused_with_the_way_to_a_stock_one():
    _stock, model = stock_and_converted("linear", "tensorwise")
    with pytest.raises(RuntimeError, match=r"jit\.script.*revert\(stock\)"):
        torch.jit.script(model.eval())
    copied = copy.deepcopy(model)
    revert(copied)
    torch.jit.script(copied)(_x())
