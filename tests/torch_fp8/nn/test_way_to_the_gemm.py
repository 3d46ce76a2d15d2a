"""How many modules of the engine an input enters on its way to the GEMM: one reads as many.

Counted are the modules whose functions run from the layer's forward until the product; an operator
counts as the one that defines it and the registry that calls it, for its inside is a kernel on a
card and a reference here.
"""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_fp8
import torch_fp8.ops.scaled_mm as gemm
from tests.internals import Float8Layer, layer_fp8
from tests.steps import renew_scales
from torch_fp8 import FP8Config, convert_to_float8

ENGINE = Path(torch_fp8.__file__).parent
MOST = 8


def places_of(value):
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()}
    if isinstance(value, tuple):
        return set().union(*map(places_of, value))
    return set()


class Walk:
    """The files that an input enters, as an argument of their functions, up to the product.

    What such a function returns is followed in its place: a view, a payload, a tuple with one. The
    layer's own parameters are not followed, nor what an operator does inside.

    Attributes:
        files: that the input enters, in order.
        modules: whose functions run, with the input or without.
    """

    def __init__(self, layer, x):
        self.files: list[str] = []
        self.modules: set[str] = set()
        self._parameters = set().union(*map(places_of, layer.parameters()))
        self._followed = places_of(x)
        self._holds: list[object] = []  # so that no memory is used again
        self._running: set[object] = set()
        self._begun = self._ended = False
        self._operator = None

    def __call__(self, frame, event, argument):
        if event == "return":
            self._operator = None if frame is self._operator else self._operator
            if frame in self._running:
                self._running.discard(frame)
                self._follow(argument)
        if event != "call" or self._ended or self._operator is not None:
            return
        code = frame.f_code
        self._begun = self._begun or code is Float8Layer.forward.__code__
        path = Path(code.co_filename)
        if not self._begun or ENGINE not in path.parents:
            return
        self._ended = code is gemm._multiply.__code__
        file = str(path.relative_to(ENGINE))
        self.modules |= set() if self._ended else {file}
        if path.name == "registry.py":  # an operator's inside is a kernel on a card
            self._operator = frame
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        arguments = tuple(frame.f_locals.get(name) for name in code.co_varnames[:count])
        if not places_of(arguments) & self._followed:
            return
        self._running.add(frame)
        if path.name != "registry.py" and self.files[-1:] != [file]:
            self.files.append(file)

    def _follow(self, value):
        self._holds.append(value)
        self._followed |= places_of(value) - self._parameters


def walk(layer, x):
    followed = Walk(layer, x)
    sys.setprofile(followed)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return followed


def trained(recipe):
    model = nn.Sequential(nn.Linear(128, 128))
    convert_to_float8(model, FP8Config(recipe=recipe))
    x = torch.randn(32, 128, requires_grad=True)
    model(x).sum().backward()  # what is made once is made
    renew_scales()
    return model[0], x


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_few_modules_lie_between_a_layer_and_its_gemm(recipe):
    modules = walk(*trained(recipe)).modules
    assert len(modules) <= MOST, "\n".join(modules)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_an_input_enters_five_files_before_its_gemm_and_none_twice(recipe):
    layer, x = trained(recipe)
    assert walk(layer, x).files == [
        "nn/linear.py",
        "nn/layer_fp8.py",
        "nn/linear_function.py",
        "tensor/quantizer.py",
        "ops/quantize.py",
        "ops/scaled_mm.py",  # the GEMM's
    ]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_quantizers_are_made_once_for_both_passes_of_a_checkpoint(recipe, monkeypatch):
    model = nn.Sequential(nn.Linear(128, 128))
    convert_to_float8(model, FP8Config(recipe=recipe))
    x = torch.randn(32, 128, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    made = []
    make = layer_fp8.WeightQuantizer
    monkeypatch.setattr(layer_fp8, "WeightQuantizer", lambda *a: made.append(a) or make(*a))
    for _ in range(2):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert not made
    model[0].restart()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert len(made) == 1
