"""Detection of RMSNorms, ``x * rstd * weight`` or ``x * rstd * (1 + weight)``, by a trial run.

Names do not matter. An RMSNorm is a module with one weight (C,) and an epsilon whose forward takes
only the input, and computes one of the two formulas on trial data; Gemma uses the second one. A
forward with more arguments, such as the gate of Mamba 2's norm, is rejected, because a trial with
the input alone cannot show what it does with them. `torch_fp8.nn.trial_reads` notes what the
forward reads in the trial.
"""

import functools
import inspect
import warnings
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.nn.class_swap import user_class
from torch_fp8.nn.rms_norm import RMSNormSpec
from torch_fp8.nn.trial_reads import Recorder, TrialReads

_EPS_NAMES = ("variance_epsilon", "eps")
_TRIED = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
)
"""Dtypes of input and weight."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
"""The module may round to the narrower dtype twice; we round once."""


class FoundNorm(NamedTuple):
    """An RMSNorm: its formula, and what its forward read in the trials that show it."""

    spec: RMSNormSpec
    reads: TrialReads


_norms: dict[Hashable, list[FoundNorm]] = {}
"""Norms found so far, by class and size; equal norms are tried only once."""


def find_rms_norm(module: nn.Module) -> FoundNorm | None:
    """Return the formula of an RMSNorm, or None if the module is not one."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or len(module._parameters) != 1:
        return None
    cls = user_class(type(module))
    others = (*module.children(), *module.buffers(recurse=False))
    if "forward" in module.__dict__ or others or not takes_input_alone(cls):
        return None
    eps = next((e for n in _EPS_NAMES if isinstance(e := getattr(module, n, None), float)), None)
    if eps is None:
        return None
    equal = _norms.setdefault((cls, weight.shape[0]), [])
    for norm in equal:
        if norm.reads.change(module) is None:
            return norm
    tried = _tried(module, eps, weight.shape[0])
    if tried is not None:
        equal.append(tried)
    return tried


@functools.cache
def takes_input_alone(cls: type[nn.Module]) -> bool:
    """Return whether a class's forward has one argument besides ``self``, apart from ``*args``."""
    try:
        _, *arguments = inspect.signature(cls.forward).parameters.values()
    except ValueError:  # written in C
        return False
    named = [a for a in arguments if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    return len(named) == 1


@_disable_current_modes()  # real tensors, even if the model has fake ones
@torch.inference_mode(False)  # also enables gradients
def _tried(module: nn.Module, eps: float, size: int) -> FoundNorm | None:
    """Return the spec whose results equal the module's own forward on the CPU.

    They are equal in all dtypes, training or not, for values of all magnitudes, and have the same
    gradients.
    """
    try:
        recorder = Recorder(module, {"weight": None, "training": True})
    except Exception:  # a class whose reads cannot be recorded
        return None
    for spec in (RMSNormSpec(eps, o, p) for o in (0.0, 1.0) for p in (True, False)):
        if all(_agrees(recorder, spec, size, *dtypes) for dtypes in _TRIED):
            reads = recorder.reads()
            return None if reads is None else FoundNorm(spec, reads)
    return None


def _agrees(
    recorder: Recorder, spec: RMSNormSpec, size: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> bool:
    generator = torch.Generator().manual_seed(0)
    # A row with values near sqrt(eps) shows where eps is added, the last two show clamps.
    rows = [spec.eps**0.5, 1.0, 8.0, 0.0, 2.0**-30, 2.0**30]
    scale = torch.tensor(rows, device="cpu", dtype=torch.float32)[:, None]
    x = torch.randn(6, size, generator=generator, device="cpu", dtype=torch.float32)
    x = x.sign() * x.abs().clamp(2.0**-4) * scale  # no results that float16 stores as subnormals
    x = x.clamp(-3e4, 3e4).to(dtype) if dtype == torch.float16 else x.to(dtype)
    weight = torch.rand(size, generator=generator, device="cpu", dtype=torch.float32) + 0.5
    exponents = torch.arange(size, device="cpu", dtype=torch.float32) % 17 - 8
    weight = nn.Parameter((weight * exponents.exp2()).to(weight_dtype))
    recorder.give("weight", weight)
    out_dtype = torch.promote_types(dtype, weight_dtype) if spec.promotes else dtype
    tolerance = max(_TOLERANCE[dtype], _TOLERANCE[weight_dtype])
    with_gradients = dtype == weight_dtype == torch.float32
    for training, tried in ((True, x[:3]), (False, x[None])):
        recorder.give("training", training)
        tried = tried.detach().requires_grad_(with_gradients)
        got = _result(recorder.twin, tried, with_gradients)
        if not isinstance(got, Tensor) or got.dtype != out_dtype or got.shape != tried.shape:
            return False
        want = _norm(tried, weight, spec).to(out_dtype)
        if not torch.allclose(got.float(), want.float(), rtol=tolerance, atol=0.0):
            return False
        if with_gradients and not _same_gradients(got, want, (tried, weight)):
            return False
    return True


def _result(twin: Any, x: Tensor, with_gradients: bool) -> Any:
    try:
        with (
            torch.set_grad_enabled(with_gradients),
            torch.autocast("cpu", enabled=False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # torch warns about mixed dtypes
            return twin.forward(x)
    except Exception:
        return None


def _norm(x: Tensor, weight: Tensor, spec: RMSNormSpec) -> Tensor:
    x = x.float()
    rstd = (x.square().mean(-1, keepdim=True) + spec.eps).rsqrt()
    return x * rstd * (weight.float() + spec.offset)


def _same_gradients(got: Tensor, want: Tensor, inputs: tuple[Tensor, ...]) -> bool:
    if not got.requires_grad:
        return False
    grad = torch.linspace(-1, 2, got.numel(), device="cpu", dtype=torch.float32).view_as(got)
    pairs = (torch.autograd.grad(y, inputs, grad, allow_unused=True) for y in (got, want))
    for ours, theirs in zip(*pairs, strict=True):
        if ours is None or theirs is None:
            return False
        limit = 1e-4 * theirs.abs().amax(-1, keepdim=True)
        if not bool(((ours - theirs).abs() <= limit).all()):
            return False
    return True
