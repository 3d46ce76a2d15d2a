"""As much of ``transformer_engine`` as the default tests need.

GEMMs run in high precision, and delayed scaling keeps nothing. As in the original, ``te.Linear``
has parameters of its own, and refuses several dtypes outside autocast, and numbers of tokens that
cuBLAS does not take.
"""

import contextlib
import enum
import importlib.machinery
import importlib.util
import math
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VERSION = "2.20.2"
_running: list[Any] = []


@contextlib.contextmanager
def autocast(enabled: bool = True, recipe: Any = None) -> Any:
    """Name the recipe that layers within run."""
    _running.append(recipe)
    yield
    _running.pop()


class Linear(nn.Module):
    """``te.Linear``: refuses what the original does, and multiplies in high precision."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, params_dtype: Any = None,
        device: Any = "cuda",
    ) -> None:  # fmt: skip
        super().__init__()
        where = {"device": device, "dtype": params_dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **where))
        self.bias = nn.Parameter(torch.empty(out_features, **where)) if bias else None

    def forward(self, inp: Tensor) -> Tensor:
        if len(_running) == 0:
            raise AssertionError("te.Linear runs outside te.autocast")
        dtype = self._activation_dtype(inp)
        for x in (inp, self.weight):
            if math.prod(x.shape[:-1]) % 8 or x.shape[-1] % 16:
                raise ValueError(f"FP8 execution requires other dims than {list(x.size())}")
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(inp.device.type, enabled=False):
            return F.linear(inp.to(dtype), self.weight.to(dtype), bias)

    def _activation_dtype(self, inp: Tensor) -> torch.dtype:
        if torch.is_autocast_enabled(inp.device.type):
            return torch.get_autocast_dtype(inp.device.type)
        assert {p.dtype for p in self.parameters()} == {inp.dtype}, "several dtypes"
        return inp.dtype

    def get_fp8_meta_tensors(self) -> None:
        """Say that there is no delayed scaling."""


def modules() -> dict[str, Any]:
    """The packages by name, for ``sys.modules``."""
    names = ("", ".common", ".common.recipe", ".pytorch")
    specs = [importlib.machinery.ModuleSpec(f"transformer_engine{name}", None) for name in names]
    te = {spec.name: importlib.util.module_from_spec(spec) for spec in specs}
    root, common, recipe, pytorch = te.values()
    root.__version__, root.common, root.pytorch, common.recipe = VERSION, common, pytorch, recipe
    recipe.Format = enum.Enum("Format", "E4M3 E5M2 HYBRID")
    scalings = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")
    for name in scalings:
        setattr(recipe, name, type(name, (types.SimpleNamespace,), {}))
    pytorch.Linear, pytorch.autocast = Linear, autocast
    Linear.__module__ = pytorch.__name__
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    answers = {"fp8": (True, ""), "fp8_block_scaling": (True, ""), "mxfp8": (False, reason)}
    for name, answer in answers.items():
        setattr(pytorch, f"is_{name}_available", lambda return_reason, answer=answer: answer)
    return te
