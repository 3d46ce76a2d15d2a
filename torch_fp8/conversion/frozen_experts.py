"""Storage of frozen fused experts as FP8 only, one byte per element."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.conversion.frozen_layers import MERGED, NOTHING, FreezeReport, thawed_bytes
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.fsdp.expert_gather import is_expert_weight, why_not_gathered
from torch_fp8.distributed.fsdp.frozen_gather import can_be_frozen
from torch_fp8.distributed.fsdp.split_weights import fsdp_params
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.frozen_storage import ThawNotice
from torch_fp8.tensor.dtensor import local

NOT_BY_FSDP = "ranks hold different experts, and FSDP2 does not gather them"


def freeze_experts(model: nn.Module, meant: Callable[[RunsFP8], bool]) -> FreezeReport:
    """Store the weights of some expert modules as FP8 only.

    Args:
        model: converted model.
        meant: function that tells whether a module's weights should be frozen if they can be.
    """
    counts = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    merged = {
        adapter.get_base_layer()
        for adapter in model.modules()
        if getattr(adapter, "parameter_name", None) and getattr(adapter, "merged", False)
    }
    notice, sharded, report, waits = ThawNotice(), _sharded(model), NOTHING, False
    for name, experts in model.named_modules():
        if not isinstance(experts, Float8Experts) or not meant(experts):
            continue
        weights = experts.fp8_weights
        reason = MERGED if experts in merged else None
        if any(isinstance(w, DTensor) for w in weights):
            reason = reason or next((why for w in weights if (why := sharded(w))), None)
        if any(counts[id(w)] > 1 for w in weights):
            reason = "its weight is shared with another module"
        names = tuple(f"{name}.{key}".lstrip(".") for key in experts.fp8_weight_names)
        if reason is not None:
            report += replace(NOTHING, kept=tuple((full, reason) for full in names))
            continue
        before, numel = thawed_bytes(*weights), sum(local(w).numel() for w in weights)
        waits = waits or any(isinstance(w, DTensor) for w in weights)
        scales = sum(local(w).shape[:2].numel() * _SCALE for w in weights)
        del weights  # a further reference would prevent swapping the Parameters
        experts.freeze_weights(experts.fp8.recipe, experts.fp8.emulate, notice)
        report += FreezeReport(names, (), experts.fp8.recipe, numel, before, numel + scales)
    if waits:
        configs = (m.fp8.config for m in model.modules() if isinstance(m, Float8Experts))
        connect_fsdp(model, next(configs))
    return report


_SCALE = 4
"""Bytes of one row's scale, a float32."""


def _sharded(model: nn.Module) -> Callable[[Tensor], str | None]:
    """Return a function from a sharded expert weight to why it cannot be frozen; None: it can."""
    reasons: dict[int, str | None] = {}
    for param in fsdp_params(model):
        info = param._module_info
        if is_expert_weight(info.module, info.param_name):
            why = None if can_be_frozen(param) else why_not_gathered(param) or NOT_BY_FSDP
            reasons[id(param.sharded_param)] = why
    return lambda weight: reasons.get(id(weight), NOT_BY_FSDP)
