"""Detection of linear layers, ``x w^T + b`` or (transposed weight) ``x w + b``, by a trial run.

The module's own forward runs on a twin that has nothing but a small weight and bias. Its results
must equal those of ``F.linear``, and it must fail on the same inputs. A forward that reads anything
else of its module (a flag, a scale, an adapter) fails on the twin, so the module is not converted.
"""

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.nn.class_swap import stock_class

_NUM_OUT, _NUM_IN = 5, 7
_TRIED = (torch.float32, torch.bfloat16)


def computes_linear(module: nn.Module, *, transposed: bool = False) -> bool:
    """Return whether a module's class computes ``F.linear(x, weight, bias)``.

    Args:
        module: module with a weight (N, K), or (K, N) if `transposed`.
        transposed: whether to compare with ``F.linear(x, weight.T, bias)`` instead.
    """
    own = module._parameters
    if own.get("weight") is None or set(own) - {"weight", "bias"}:
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    cls: Any = stock_class(type(module))
    return not list(module.children()) and _tried(cls, own.get("bias") is not None, transposed)


@functools.lru_cache(maxsize=64)
def _tried(cls: Any, has_bias: bool, transposed: bool) -> bool:
    parameters = inspect.signature(cls.forward).parameters
    if len(parameters) != 2:  # self and the input
        return False
    with _disable_current_modes(), torch.autocast("cpu", enabled=False), torch.no_grad():
        return all(
            _agrees(cls, has_bias, transposed, shape, a, b)
            for shape in ((4,), (2, 3))
            for a in _TRIED
            for b in _TRIED
        )


def _agrees(
    cls: Any,
    has_bias: bool,
    transposed: bool,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(dtype: torch.dtype, *size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cpu", dtype=torch.float32).to(dtype)

    x = random(dtype, *shape, _NUM_IN)
    weight = random(weight_dtype, _NUM_OUT, _NUM_IN)
    bias = random(weight_dtype, _NUM_OUT) if has_bias else None
    want = _result(lambda: F.linear(x, weight, bias))
    stored = weight.t().contiguous() if transposed else weight
    twin = cls.__new__(cls)
    own = {"weight": nn.Parameter(stored), "bias": None if bias is None else nn.Parameter(bias)}
    twin.__dict__ = {"_parameters": own, "_buffers": {}, "_modules": {}, **_SIZES}
    got = _result(lambda: cls.forward(twin, x))
    if want is None or got is None:
        return want is got
    if not isinstance(got, Tensor) or got.dtype != want.dtype or got.shape != want.shape:
        return False
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6  # BF16 may be rounded twice
    return torch.allclose(got.float(), want.float(), rtol=tolerance, atol=tolerance)


_SIZES = {"in_features": _NUM_IN, "out_features": _NUM_OUT, "nx": _NUM_IN, "nf": _NUM_OUT}
"""Attributes of ``nn.Linear`` and Conv1D with these sizes."""


def _result(run: Any) -> Any:
    try:
        return run()
    except Exception:
        return None
