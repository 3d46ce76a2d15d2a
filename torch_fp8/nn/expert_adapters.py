"""LoRA adapters of fused expert weights, applied as two factors.

During a forward, PEFT (``target_parameters``) adds ``scaling * lhs @ rhs`` to a weight (E, N, K) by
a parametrization. Every read of the weight then makes a new tensor of its size, which autograd
saves. Converted experts multiply by the FP8 weight and, in high precision, by both factors instead,
and need no such tensor. `FactoredAdapter` makes PEFT's layers pass on the factors. If an adapter
was added after the conversion, the factors are read from the parametrization.

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
from torch_fp8.ops.moe_rows import group_of_rows
from torch_fp8.tensor.base import dequantized
from torch_fp8.tensor.split_weight import SplitWeight
from torch_fp8.tensor.weight_half import half

_ALIGNMENT = 8
"""Grouped GEMMs need sizes that are multiples of this many BF16 elements, 16 bytes."""


class Factors(NamedTuple):
    """An adapter of a weight in its stored layout: ``weight + scaling * lhs @ rhs``.

    Attributes:
        lhs: (E, N, r), or (E, K, r) for a transposed weight.
        rhs: (E, r, K), or (E, r, N) for a transposed weight.
        scaling: factor of the product.
    """

    lhs: Tensor
    rhs: Tensor
    scaling: float


class FactoredAdapter(nn.Module):
    """Mixin for PEFT's ``ParamWrapper`` that passes its factors to experts in FP8."""

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
            with super()._activate_lora(active_adapters):
                yield
            return
        before = base.fp8_factors
        own = [Factors(*self.get_delta_factors(name)) for name in adapters]
        base.fp8_factors = {**(before or {}), self.parameter_name: own}
        try:
            yield
        finally:
            base.fp8_factors = before


def take_adapters(model: nn.Module) -> None:
    """Make the adapters of converted experts pass on their factors, and no other adapters."""
    for module in model.modules():
        if not callable(getattr(module, "get_delta_factors", None)):
            continue
        wanted = hasattr(module.get_base_layer(), "fp8_factors")
        if wanted and not isinstance(module, FactoredAdapter):
            add_mixin(module, FactoredAdapter)
        elif not wanted and isinstance(module, FactoredAdapter):
            remove_mixin(module, FactoredAdapter)


def weight_and_factors(module: Any, name: str) -> tuple[Tensor, Sequence[Factors]]:
    """Return an expert weight without its adapters, and the active adapters.

    Adapters without factors (several at once, added after the conversion) are already added to the
    returned weight.
    """
    handed = (module.fp8_factors or {}).get(name, ())
    lists = getattr(module, "parametrizations", None)
    if lists is None or name not in lists:
        return getattr(module, name), handed
    proxies = list(lists[name])
    if not all(hasattr(proxy, "lhs") and hasattr(proxy, "rhs") for proxy in proxies):
        return getattr(module, name), handed
    return lists[name].original, [Factors(p.lhs, p.rhs, p.scaling) for p in proxies]


@contextlib.contextmanager
def whole_weights(module: Any) -> Iterator[None]:
    """Replace a module's weights by plain ones with the active adapters added, for its own forward.

    Under autocast, which would cast to BF16 anyway, a weight in two halves is its BF16 half.
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
            # The attribute hides the Parameter of the same name.
            module.__dict__[name] = value
            shown.append(name)
    try:
        yield
    finally:
        for name in shown:
            del module.__dict__[name]


def multiply_factors(rows: Tensor, offs: Tensor, factors: Factors, transposed: bool) -> Tensor:
    """Compute an adapter's product ``scaling * x delta_e^T`` (R, N) for the rows of each expert.

    Rows behind the last group are zero.

    Args:
        rows: (R, K), in the dtype of the GEMMs.
        offs: ends of the groups, see `torch_fp8.ops.moe_rows.Route`.
        factors: factors of the weight in its stored layout.
        transposed: whether the weight is stored as (E, K, N), as delta_e^T.
    """
    lhs, rhs = (factor.to(rows.dtype) for factor in factors[:2])
    # (E, K, r), (E, r, N)
    first, second = (lhs, rhs) if transposed else (rhs.transpose(1, 2), lhs.transpose(1, 2))
    more = -first.shape[2] % _ALIGNMENT  # r is padded to a multiple of 8
    first = F.pad(first, (0, more)).contiguous()
    second = F.pad(second, (0, 0, 0, more)).contiguous()
    # torch's grouped GEMMs leave rows behind the last group undefined, also in backward.
    behind = (group_of_rows(offs, rows.shape[0]) == offs.shape[0])[:, None]
    low = F.grouped_mm(rows.masked_fill(behind, 0), first, offs=offs)  # (R, r)
    return F.grouped_mm(low, second, offs=offs).masked_fill(behind, 0) * factors.scaling  # (R, N)
