"""LoRA adapters of fused expert weights, multiplied by their factors.

PEFT (``target_parameters``) adds ``scaling * lhs @ rhs`` to a weight (E, N, K) by a parametrization
for the time of a forward: whoever reads the weight gets a new tensor of its size, which autograd
keeps. Converted experts multiply by the weight and by both factors instead, the latter two in high
precision, and make no tensor of that size. `FactoredAdapter` has PEFT's layers hand the factors
over; where an adapter came after the conversion, they are read from the parametrization.

Legend: E experts, N out, K in, R rows, r rank.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fp8.autograd.current_pass import in_high_precision
from torch_fp8.nn.class_swap import add_mixin, remove_mixin
from torch_fp8.ops.moe_route import group_of_rows
from torch_fp8.tensor.base import dequantized
from torch_fp8.tensor.split_weight import SplitWeight
from torch_fp8.tensor.weight_half import half

_ALIGNMENT = 8
"""The BF16 elements of which grouped GEMMs take multiples: 16 bytes."""


class Factors(NamedTuple):
    """An adapter of a weight as it is stored: ``weight + scaling * lhs @ rhs``.

    Attributes:
        lhs: (E, N, r), or (E, K, r) of a transposed weight.
        rhs: (E, r, K), or (E, r, N) of a transposed weight.
        scaling: number.
    """

    lhs: Tensor
    rhs: Tensor
    scaling: float


class FactoredAdapter(nn.Module):
    """The part of PEFT's ``ParamWrapper`` that hands its factors to experts in FP8."""

    lora_A: nn.ModuleDict
    num_experts: int
    parameter_name: str
    get_base_layer: Any
    get_delta_factors: Any

    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        base = self.get_base_layer()
        adapters = [name for name in active_adapters or () if name in self.lora_A]
        if not hasattr(base, "fp8_factors") or self.num_experts == 1:
            stock: Any = super()
            with stock._activate_lora(active_adapters):
                yield
            return
        before = base.fp8_factors
        own = [Factors(*self.get_delta_factors(name)) for name in adapters]
        base.fp8_factors = {**(before or {}), self.parameter_name: own}
        try:
            yield
        finally:
            base.fp8_factors = before


def take_adapters(model: nn.Module, is_converted: Any) -> None:
    """Have the adapters of converted experts hand over their factors, and no others.

    Args:
        model: any module.
        is_converted: tells of a module whether it computes experts in FP8.
    """
    for module in model.modules():
        if not callable(getattr(module, "get_delta_factors", None)):
            continue
        adapter: Any = module
        wanted = is_converted(adapter.get_base_layer())
        if wanted and not isinstance(module, FactoredAdapter):
            add_mixin(module, FactoredAdapter)
        elif not wanted and isinstance(module, FactoredAdapter):
            remove_mixin(module, FactoredAdapter)


def weight_and_factors(module: Any, name: str) -> tuple[Tensor, Sequence[Factors]]:
    """Return a weight of experts without adapters, and the adapters that are active now.

    An adapter that keeps no factors (several at once, added after the conversion) is in the weight
    already.
    """
    handed = (module.fp8_factors or {}).get(name, ())
    lists = module._modules.get("parametrizations")
    if lists is None or name not in lists:
        return getattr(module, name), handed
    proxies = list(lists[name])
    if not all(hasattr(proxy, "lhs") and hasattr(proxy, "rhs") for proxy in proxies):
        return getattr(module, name), handed
    return lists[name].original, [Factors(p.lhs, p.rhs, p.scaling) for p in proxies]


@contextlib.contextmanager
def whole_weights(module: Any) -> Iterator[None]:
    """Show a module's own forward its weights with the active adapters in them, within.

    A weight in two halves shows its BF16 half under autocast, which would cast the whole one.
    """
    shown: list[str] = []
    for name in module.fp8_weight_names:
        weight, factors = module._parameters.get(name), (module.fp8_factors or {}).get(name, ())
        if weight is None:
            continue
        value = dequantized(weight)
        casts = torch.is_autocast_enabled(weight.device.type) and not in_high_precision()
        if casts and isinstance(weight, SplitWeight):
            value = half(weight)
        for lhs, rhs, scaling in factors:
            value = torch.baddbmm(value, lhs.to(value.dtype), rhs.to(value.dtype), alpha=scaling)
        if value is not weight:
            # The attribute hides the Parameter of this name, which stays where it is.
            module.__dict__[name] = value
            shown.append(name)
    try:
        yield
    finally:
        for name in shown:
            del module.__dict__[name]


def multiply_factors(rows: Tensor, offs: Tensor, factors: Factors, transposed: bool) -> Tensor:
    """Compute ``scaling * x delta_e`` for the rows of each expert, (R, N), zeros behind them.

    Args:
        rows: (R, K), in the dtype in which to multiply.
        offs: see `torch_fp8.ops.moe_route.Route`.
        factors: the factors of the weight as it is stored.
        transposed: whether that is (E, K, N).
    """
    lhs, rhs = (factor.to(rows.dtype) for factor in factors[:2])
    # (E, K, r) and (E, r, N)
    first, second = (lhs, rhs) if transposed else (rhs.transpose(1, 2), lhs.transpose(1, 2))
    more = -first.shape[2] % _ALIGNMENT
    first = F.pad(first, (0, more)).contiguous()
    second = F.pad(second, (0, 0, 0, more)).contiguous()
    # Grouped GEMMs of torch leave what lies behind the last group as it was, in backward too.
    behind = (group_of_rows(offs, rows.shape[0]) == offs.shape[0])[:, None]
    low = F.grouped_mm(rows.masked_fill(behind, 0), first, offs=offs)
    output = F.grouped_mm(low, second, offs=offs)
    return output.masked_fill(behind, 0) * factors.scaling
