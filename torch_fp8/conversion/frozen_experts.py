"""Fused experts whose weights nobody trains: held in FP8 alone, one byte an element."""

from collections import Counter
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.conversion.frozen_layers import MERGED, NOTHING, FreezeReport
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.frozen_storage import ThawNotice
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight

SEVERAL_RANKS = "experts are stored as FP8 alone in a single process only"


def freeze_experts(model: nn.Module, meant: Callable[[RunsFP8], bool]) -> FreezeReport:
    """Hold the weights of some expert modules in FP8 alone.

    Args:
        model: converted.
        meant: whether a module's weights are to be frozen, if nothing speaks against it.
    """
    counts = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    merged = {
        adapter.get_base_layer()
        for adapter in model.modules()
        if getattr(adapter, "parameter_name", None) and getattr(adapter, "merged", False)
    }
    notice, report = ThawNotice(), NOTHING
    for name, experts in model.named_modules():
        if not isinstance(experts, Float8Experts) or not meant(experts):
            continue
        weights = experts.fp8_weights
        reason = MERGED if experts in merged else None
        if any(isinstance(w, DTensor) for w in weights) or _has_several_ranks():
            reason = SEVERAL_RANKS
        if any(counts[id(w)] > 1 for w in weights):
            reason = "its weight is shared with another module"
        names = tuple(f"{name}.{key}".lstrip(".") for key in experts.fp8_weight_names)
        if reason is not None:
            left = tuple((full, reason) for full in names)
            report += FreezeReport((), left, None, 0, 0, 0)
            continue
        before = sum(w.numel() * _element_size(w) for w in weights)
        del weights  # or the Parameters could not be replaced
        experts.freeze_weights(experts.fp8.recipe, experts.fp8.emulate, notice)
        payloads = [w.payload for w in experts.frozen_weights.values()]
        after, numel = sum(p.num_bytes for p in payloads), sum(p.qdata.numel() for p in payloads)
        report += FreezeReport(names, (), experts.fp8.recipe, numel, before, after)
    return report


def _element_size(weight: Tensor) -> int:
    if isinstance(weight, Float8FrozenWeight):
        return weight.payload.thawed_dtype.itemsize
    return weight.element_size()


def _has_several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
