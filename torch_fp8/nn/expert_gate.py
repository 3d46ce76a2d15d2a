"""`gate_form`: the gated activation of a module of experts, found by a trial run."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.kernels.arguments import GateForm
from torch_fp8.nn.trial_reads import Recorder, TrialReads, computes_alike
from torch_fp8.ops.expert_gate import activation, split_gate

_FLAGS = ("has_gate", "has_post_expert_norm")


class FoundGate(NamedTuple):
    """A gated activation: its form, and what the module's `_apply_gate` read in the trial."""

    form: GateForm
    reads: TrialReads


def find_gate(module: Any) -> FoundGate | None:
    """Return a module's gated activation, or None if it is unknown, or not gated.

    Args:
        module: module of experts whose `_apply_gate` maps (R, 2I) to (R, I).
    """
    if not getattr(module, "has_gate", False) or module.has_post_expert_norm:
        return None
    try:
        recorder = _recorder(module)
    except Exception:  # a class whose reads cannot be recorded
        return None
    for form in _forms(module):
        if _agrees(recorder, form):
            reads = recorder.reads()
            return None if reads is None else FoundGate(form, reads)
    return None


def _recorder(module: nn.Module) -> Recorder:
    children = {k: Recorder(child, {"training": True}) for k, child in module.named_children()}
    recorder = Recorder(module, {"training": True, **children})
    for name in _FLAGS:  # transformers 5.17 sets only the first
        if name in vars(module) or hasattr(recorder.cls, name):
            getattr(recorder.twin, name)
    return recorder


def _agrees(recorder: Recorder, form: GateForm) -> bool:
    """Return whether the module's own `_apply_gate` has this form, training or not."""

    def want(h: Tensor) -> Tensor:
        return activation(*split_gate(h, form), form)

    try:
        with _disable_current_modes():
            for training in (True, False):
                recorder.give("training", training)
                if not computes_alike(recorder.twin._apply_gate, want):
                    return False
    except Exception:  # it needs more than h
        return False
    return True


def _forms(module: Any) -> list[GateForm]:
    forms = [GateForm(interleaved) for interleaved in (False, True)]
    alpha, limit = getattr(module, "alpha", 1.0), getattr(module, "limit", None)
    if isinstance(limit, float | int) and isinstance(alpha, float | int) and limit > 0:
        forms += [GateForm(inter, True, float(alpha), float(limit)) for inter in (False, True)]
    return forms
