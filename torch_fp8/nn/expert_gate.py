"""`gate_form`: the gated activation of a module of experts, found by a trial run."""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import GateForm
from torch_fp8.ops.expert_gate import activation, split_gate

_TRIAL = 12.0
"""Largest trial value; it exceeds the clamping limits of models."""


def gate_form(module: Any) -> GateForm | None:
    """Return the form of a module's gated activation; None: it is unknown, or not gated.

    Args:
        module: module of experts whose `_apply_gate` maps (R, 2I) to (R, I).
    """
    if not getattr(module, "has_gate", False) or module.has_post_expert_norm:
        return None
    steps = torch.linspace(-_TRIAL, _TRIAL, 11, device="cpu", dtype=torch.float32)
    h = torch.cartesian_prod(steps, steps).reshape(11, -1)  # all pairs of gate and up values
    expected = _applied(module, h)
    if expected is None:
        return None
    for form in _forms(module):
        gate, up = split_gate(h, form)
        actual = activation(gate, up, form)
        if expected.shape == actual.shape and torch.allclose(expected, actual, 1e-5, 1e-5):
            return form
    return None


@torch.no_grad()
def _applied(module: Any, h: Tensor) -> Tensor | None:
    """Return the module's own `_apply_gate(h)` on the CPU; None: it fails, or needs more than h."""
    try:
        with torch.autocast("cpu", enabled=False):
            applied = module._apply_gate(h)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return applied if isinstance(applied, Tensor) else None


def _forms(module: Any) -> list[GateForm]:
    forms = [GateForm(interleaved) for interleaved in (False, True)]
    alpha, limit = getattr(module, "alpha", 1.0), getattr(module, "limit", None)
    if isinstance(limit, float | int) and isinstance(alpha, float | int) and 0 < limit < _TRIAL:
        forms += [GateForm(inter, True, float(alpha), float(limit)) for inter in (False, True)]
    return forms
