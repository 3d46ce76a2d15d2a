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

_running: list[Any] = []


@contextlib.contextmanager
def autocast(enabled: bool = True, recipe: Any = None) -> Any:
    """Name the recipe that layers within run."""
    _running.append(recipe)
    yield
    _running.pop()


class Linear(nn.Module):
    """``te.Linear``: refuses what the original does, and multiplies in high precision."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any):
        super().__init__()
        where = {"device": options.get("device", "cuda"), "dtype": options.get("params_dtype")}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **where))
        self.bias = nn.Parameter(torch.empty(out_features, **where)) if bias else None

    def forward(self, inp: Tensor) -> Tensor:
        assert len(_running), "te.Linear runs outside te.autocast"
        dtype, device = inp.dtype, inp.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        else:
            assert {p.dtype for p in self.parameters()} == {dtype}, "several dtypes"
        for x in (inp, self.weight):
            if math.prod(x.shape[:-1]) % 8 or x.shape[-1] % 16:
                raise ValueError(f"FP8 execution requires other dims than {list(x.size())}")
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return F.linear(inp.to(dtype), self.weight.to(dtype), bias)

    def get_fp8_meta_tensors(self) -> None:
        """Say that there is no delayed scaling."""


def modules() -> dict[str, Any]:
    """The packages by name, for ``sys.modules``."""
    names = ("", ".common", ".common.recipe", ".pytorch")
    specs = [importlib.machinery.ModuleSpec(f"transformer_engine{name}", None) for name in names]
    te = {spec.name: importlib.util.module_from_spec(spec) for spec in specs}
    root, common, recipe, pytorch = te.values()
    root.__version__, root.common, root.pytorch, common.recipe = "2.20.2", common, pytorch, recipe
    recipe.Format = enum.Enum("Format", "E4M3 E5M2 HYBRID")
    for name in ("Delayed", "Float8Current", "Float8Block", "MXFP8Block"):
        setattr(recipe, f"{name}Scaling", type(f"{name}Scaling", (types.SimpleNamespace,), {}))
    pytorch.Linear, pytorch.autocast = Linear, autocast
    Linear.__module__ = pytorch.__name__
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    pytorch.is_fp8_available = pytorch.is_fp8_block_scaling_available = lambda **_: (True, "")
    pytorch.is_mxfp8_available = lambda return_reason: (False, reason)
    return te
