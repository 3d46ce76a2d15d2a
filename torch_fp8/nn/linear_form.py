"""Detection of linear layers, ``x w^T + b`` or (transposed weight) ``x w + b``, by a trial run.

The module's own forward runs on a twin that has nothing but a small weight and bias. Its results
must equal those of ``F.linear`` for inputs of all magnitudes, with the same gradients, and it must
fail on the same inputs. A module whose forward reads anything else of it or of its class (a flag, a
scale, an adapter) is not converted (`torch_fp8.nn.trial_reads`).
"""

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.nn.class_swap import stock_class
from torch_fp8.nn.trial_reads import Recorder

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
@torch.inference_mode(False)  # also enables gradients
def _tried(cls: Any, has_bias: bool, transposed: bool) -> bool:
    parameters = inspect.signature(cls.forward).parameters
    if len(parameters) != 2:  # self and the input
        return False
    bare = cls.__new__(cls)
    object.__setattr__(bare, "__dict__", {})
    given = {"weight": None, "bias": None, **_SIZES}
    try:
        recorder = Recorder(bare, given)
    except Exception:  # a class whose reads cannot be recorded
        return False
    with _disable_current_modes(), torch.autocast("cpu", enabled=False):
        agrees = all(
            _agrees(recorder, has_bias, transposed, shape, a, b)
            for shape in ((4,), (2, 3))
            for a in _TRIED
            for b in _TRIED
        )
    reads = recorder.reads()
    return agrees and reads is not None and [name for name, _ in reads.own] == ["forward"]


def _agrees(
    recorder: Recorder,
    has_bias: bool,
    transposed: bool,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(dtype: torch.dtype, exponent: int, *size: int) -> Tensor:
        x = torch.randn(size, generator=generator, device="cpu", dtype=torch.float32)
        # Rows of three magnitudes, so that clamps lie between the values.
        powers = torch.arange(size[0], device="cpu", dtype=torch.float32) % 3 - 1
        x = x * (powers * exponent).exp2().view(-1, *[1] * (len(size) - 1))
        return x.to(dtype).requires_grad_()

    x = random(dtype, 40, *shape, _NUM_IN)
    weight = random(weight_dtype, 8, _NUM_OUT, _NUM_IN)
    bias = random(weight_dtype, 60, _NUM_OUT) if has_bias else None
    tensors = [x, weight, *([] if bias is None else [bias])]
    want = _result(lambda: F.linear(x, weight, bias))
    stored = weight.detach().t().contiguous() if transposed else weight.detach()
    recorder.give("weight", nn.Parameter(stored))
    recorder.give("bias", None if bias is None else nn.Parameter(bias.detach()))
    twin: Any = recorder.twin
    got = _result(lambda: twin.forward(x))
    if want is None or got is None:
        return want is got
    if not isinstance(got, Tensor) or got.dtype != want.dtype or got.shape != want.shape:
        return False
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6  # BF16 may be rounded twice
    limit = tolerance * F.linear(*[t.detach().abs() for t in tensors]).float()
    if not bool(((got - want).detach().float().abs() <= limit).all()):
        return False
    if dtype == torch.bfloat16:
        return True
    if not got.requires_grad:
        return False
    own = [x, twin.weight, *([] if bias is None else [twin.bias])]
    grads = (
        torch.autograd.grad(y.sum(), of, allow_unused=True)
        for y, of in ((want, tensors), (got, own))
    )
    for theirs, ours in zip(*grads, strict=True):
        if ours is None:
            return False
        ours = ours.t() if ours.shape != theirs.shape else ours
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=0):
            return False
    return True


_SIZES = {"in_features": _NUM_IN, "out_features": _NUM_OUT, "nx": _NUM_IN, "nf": _NUM_OUT}
"""Attributes of ``nn.Linear`` and Conv1D with these sizes."""


def _result(run: Any) -> Any:
    try:
        return run()
    except Exception:
        return None
