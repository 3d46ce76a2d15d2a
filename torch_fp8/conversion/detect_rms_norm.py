"""Detection of RMSNorms, ``x * rstd * weight`` or ``x * rstd * (1 + weight)``, by a trial run.

Names do not matter. An RMSNorm is a module with one weight (C,) and an epsilon whose forward takes
only the input, and computes one of the two formulas on trial data; Gemma uses the second one. A
forward with more arguments, such as the gate of Mamba 2's norm, is rejected, because a trial with
the input alone cannot show what it does with them.
"""

import functools
import inspect
import warnings
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.kernels.arguments import NormInputs
from torch_fp8.nn.class_swap import stock_class
from torch_fp8.nn.rms_norm import RMSNormSpec
from torch_fp8.ops.rms_norm import rms_norm, rms_norm_statistics

_EPS_NAMES = ("variance_epsilon", "eps")
_TRIED = (torch.float32, torch.bfloat16)
_specs: dict[Hashable, RMSNormSpec | None] = {}
"""Formulas of the norms tried so far, by class, size and plain attributes."""


def rms_norm_spec(module: nn.Module) -> RMSNormSpec | None:
    """Return the formula of an RMSNorm; None: the module is not one."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or len(module._parameters) != 1:
        return None
    cls: Any = type(module)
    others = (*module.children(), *module.buffers(recurse=False))
    if "forward" in module.__dict__ or others or not takes_input_alone(cls):
        return None
    eps_name = next((n for n in _EPS_NAMES if isinstance(getattr(module, n, None), float)), None)
    if eps_name is None:
        return None
    plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, tuple))}
    del plain["training"]
    key = (stock_class(cls), weight.shape[0], tuple(sorted(plain.items())))
    if key not in _specs:  # equal norms are tried only once
        _specs[key] = _tried(module, eps_name)
    return _specs[key]


@functools.cache
def takes_input_alone(cls: type[nn.Module]) -> bool:
    """Return whether a class's forward has one argument beside ``self``, apart from ``*args``."""
    try:
        _, *arguments = inspect.signature(cls.forward).parameters.values()
    except ValueError:  # written in C
        return False
    named = [a for a in arguments if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    return len(named) == 1


def _twin(module: nn.Module, parameters: dict[str, nn.Parameter]) -> nn.Module:
    """Return a module with the stock class and attributes of `module`, and other parameters.

    The class that ``fully_shard`` makes cannot be instantiated without arguments.
    """
    cls: Any = stock_class(type(module))
    twin: nn.Module = cls.__new__(cls)
    twin.__dict__ = {**module.__dict__, "_parameters": parameters}
    return twin


@_disable_current_modes()  # real tensors, even if the model has fake ones
def _tried(module: nn.Module, eps_name: str) -> RMSNormSpec | None:
    """Return the spec whose results equal the module's own forward on the CPU, in all dtypes."""
    eps, size = getattr(module, eps_name), module._parameters["weight"].shape[0]
    generator = torch.Generator().manual_seed(0)
    # A row with values near sqrt(eps) shows where eps is added.
    scale = torch.tensor([[eps**0.5], [1.0], [8.0]], device="cpu", dtype=torch.float32)
    x = torch.randn(3, size, generator=generator, device="cpu", dtype=torch.float32) * scale
    weight = torch.rand(size, generator=generator, device="cpu", dtype=torch.float32) + 0.5
    for spec in (RMSNormSpec(eps_name, o, p) for o in (0.0, 1.0) for p in (True, False)):
        dtypes = ((a, b) for a in _TRIED for b in _TRIED)
        if all(_agrees(module, spec, x.to(a), weight.to(b)) for a, b in dtypes):
            return spec
    return None


def _agrees(module: nn.Module, spec: RMSNormSpec, x: Tensor, weight: Tensor) -> bool:
    twin = _twin(module, {"weight": nn.Parameter(weight)})
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about mixed dtypes
            got = type(twin).forward(twin, x)
    except Exception:
        return False
    dtype = torch.promote_types(x.dtype, weight.dtype) if spec.promotes else x.dtype
    if not isinstance(got, Tensor) or got.dtype != dtype or got.shape != x.shape:
        return False
    eps = getattr(module, spec.eps_name)
    inputs = NormInputs(x, weight, eps, spec.offset, dtype)
    rstd, *_ = rms_norm_statistics(inputs, False)
    want = rms_norm(inputs.with_rstd(rstd))
    # The module may round to BF16 (8 bits) twice; we round once.
    coarse = torch.bfloat16 in (x.dtype, weight.dtype)
    return torch.allclose(got.float(), want.float(), rtol=2.0**-7 if coarse else 1e-5, atol=0.0)
