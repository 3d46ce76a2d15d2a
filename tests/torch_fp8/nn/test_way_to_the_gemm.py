"""How many modules of the engine an input enters on its way to the GEMM: one reads as many.

Counted are the modules whose functions run from the layer's forward until the product; an operator
counts as the one that defines it and the registry that calls it, for its inside is a kernel on a
card and a reference here.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_fp8
import torch_fp8.ops.scaled_mm as gemm
from tests.torch_fp8.training_step import renew_scales
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.nn import layer_quantizers
from torch_fp8.nn.linear import Float8Layer

ENGINE = Path(torch_fp8.__file__).parent
MOST = 8


def modules_on_the_way(layer, x):
    """The modules whose functions run from the layer's forward until the product, in order."""
    begins, ends = Float8Layer.forward.__code__, gemm._multiply.__code__
    entered: dict[str, None] = {}
    on, within = False, None

    def note(frame, event, argument):
        nonlocal on, within
        code = frame.f_code
        if event == "return" and frame is within:
            within = None
        if event != "call":
            return
        on = (on or code is begins) and code is not ends
        path = Path(code.co_filename)
        if on and within is None and ENGINE in path.parents:
            entered[str(path.relative_to(ENGINE))] = None
            if path.name == "registry.py":
                within = frame

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    assert "nn/linear.py" in entered
    return list(entered)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_few_modules_lie_between_a_layer_and_its_gemm(recipe):
    model = nn.Sequential(nn.Linear(128, 128))
    convert_to_float8(model, FP8Config(recipe=recipe))
    x = torch.randn(32, 128, requires_grad=True)
    model(x).sum().backward()  # what is made once is made
    renew_scales()
    modules = modules_on_the_way(model[0], x)
    assert len(modules) <= MOST, "\n".join(modules)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_quantizers_are_made_once_for_both_passes_of_a_checkpoint(recipe, monkeypatch):
    model = nn.Sequential(nn.Linear(128, 128))
    convert_to_float8(model, FP8Config(recipe=recipe))
    x = torch.randn(32, 128, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    made = []
    make = layer_quantizers.WeightQuantizer
    monkeypatch.setattr(layer_quantizers, "WeightQuantizer", lambda *a: made.append(a) or make(*a))
    for _ in range(2):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert not made
    model[0].init_scaling()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert len(made) == 1
