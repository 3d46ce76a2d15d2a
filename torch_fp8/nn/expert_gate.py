"""Which gated activation a module of experts has: `gate_form`, told by a trial."""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.gate_form import GateForm
from torch_fp8.ops.expert_gate import activation, split_gate

_TRIAL = 12.0
"""The largest value that is tried, beyond the limits that models have."""


def gate_form(module: Any) -> GateForm | None:
    """Return the form of a module's gated activation; None: it has another, or none.

    Args:
        module: experts, whose `_apply_gate` makes (R, I) of (R, 2I).
    """
    if not getattr(module, "has_gate", False) or module.has_post_expert_norm:
        return None
    steps = torch.linspace(-_TRIAL, _TRIAL, 11, device="cpu", dtype=torch.float32)
    h = torch.cartesian_prod(steps, steps).reshape(11, -1)  # each value of one beside all others
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
    """Return what the module's own function makes of h on the CPU, where it takes nothing else."""
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
