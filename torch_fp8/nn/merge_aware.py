"""`MergeAware`: LoRA over an FP8 base whose forward multiplies by the merged weight.

``y = x Q(W + s B A)^T``: every forward rounds the adapter's delta as it will be rounded when it is
merged and exported in FP8, so that you serve what you trained. Rounding to nearest loses nearly all
of a delta that is much smaller than the weight, but training that sees this can compensate. The
gradient passes the rounding unchanged (straight-through). ``dA = s B^T (g^T x)`` and
``dB = s (g^T x) A^T`` are computed without the product in parentheses, as ``(g B)^T x`` and
``g^T (x A^T)``, like in LoRA's own backward.

Cost per layer and forward: the product B A, one addition and one cast of the weight. Autograd saves
the payload, 1 byte per element, which plain LoRA does not need. The merge takes 10 bytes per
element, for one layer at a time. Evaluation reuses the payload while neither base nor adapter
changes. Adapters stored in two halves report their changes (`torch_fp8.tensor.payload_cache`);
others are known to be constant only within a rollout, which thus merges once. A CUDA graph merges
in each replay. Such a layer is a graph break for torch.compile.

Legend: M tokens, K in, N out, R rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import is_transformed, output_dtype
from torch_fp8.autograd.function import once_differentiable
from torch_fp8.nn.class_swap import add_mixin, own_child, remove_mixin, unwrapped_name
from torch_fp8.nn.delayed_scaling import WEIGHT
from torch_fp8.nn.layer_fp8 import check_input
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.hardware import is_capturing
from torch_fp8.ops.quantize import QuantizedTensor, transposed
from torch_fp8.ops.scaled_mm import cast, scaled_matmul
from torch_fp8.tensor.base import dequantized, in_shared_memory
from torch_fp8.tensor.quantizer import WeightQuantizer, matrix, quantize_input
from torch_fp8.tensor.split_weight import SplitWeight, stored


class MergeAware(nn.Module):
    """Mixin of a LoRA layer of PEFT that multiplies by the merged weight in FP8.

    It precedes PEFT's class. If the adapters are disabled or merged, or none is active in this
    layer, PEFT's own forward runs.

    Raises:
        ValueError: several adapters are active, each row of a batch names its own adapter, or an
            adapter that was added later cannot be merged into one weight.
        RuntimeError: the base is no longer stored as FP8 only.
    """

    base_layer: Float8Layer
    fp8_adapters: set[str]
    """Names of the adapters that can be merged into one weight."""
    disable_adapters: bool
    merged: bool
    active_adapters: Any
    get_delta_weight: Any
    lora_A: Any
    lora_B: Any
    lora_dropout: Any
    scaling: dict[str, float]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        active = [name for name in self.active_adapters if name in self.lora_A]
        merges = bool(active) and not (self.disable_adapters or self.merged)
        if merges and self.base_layer.runs_fp8 and not is_transformed():
            return self._merged_forward(active, x, **kwargs)
        return super().forward(x, *args, **kwargs)

    @torch.compiler.disable
    def _merged_forward(self, active: list[str], x: Tensor, **kwargs: Any) -> Tensor:
        base = self.base_layer
        if len(active) > 1 or kwargs.get("adapter_names") is not None:
            raise ValueError(
                f"FP8Config(merge_aware=True) multiplies '{base.fp8.name}' by one merged weight, "
                f"but adapters {', '.join(map(repr, active))} are active, or chosen per row; "
                "activate one with set_adapter()"
            )
        adapter = active[0]
        if adapter not in self.fp8_adapters or _dropout(self, adapter):
            _take(base.fp8.name, self, base)
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        if torch.is_grad_enabled():
            base.fp8.payloads.forget()
            return MergedLinear.apply(
                x, a, b, base.bias, base, self.merged_weight(adapter), self.scaling[adapter]
            )
        return _product(x, self._evaluation_weight(adapter, a, b), base.bias, base, wgrad=False)[0]

    @torch.no_grad()
    def merged_weight(self, adapter: str) -> QuantizedTensor:
        """Cast ``W + s B A`` (N, K), rounded to BF16, with the cast of the base.

        Args:
            adapter: name of the adapter.
        """
        base, weight = self.base_layer, self.base_layer.weight
        if base.fp8.frozen is None or isinstance(weight, DTensor):
            raise RuntimeError(
                f"'{base.fp8.name}' is no longer an FP8 base (it was thawed or sharded), and "
                "FP8Config(merge_aware=True) needs one to merge the adapter into; leave "
                "merge_aware out"
            )
        with torch.autocast(weight.device.type, enabled=False):
            delta = self.get_delta_weight(adapter).float()
            # A pickled copy of the base has BF16 values, which are exact.
            folded = (dequantized(weight).float() + delta).to(torch.bfloat16)
        return WeightQuantizer(base.fp8.quantizer(base, WEIGHT)).for_fprop(folded)

    def _evaluation_weight(self, adapter: str, a: Tensor, b: Tensor) -> QuantizedTensor:
        base, frozen = self.base_layer, self.base_layer.frozen_weight
        cache = base.fp8.payloads
        written = frozen is not None and any(map(in_shared_memory, (stored(a), stored(b), frozen)))
        if frozen is None or written or base.training or is_capturing(a.device):
            return self.merged_weight(adapter)
        versions = [
            cache.version_of(x) if isinstance(x, SplitWeight) else cache.scope for x in (a, b)
        ]
        version = None
        if None not in versions:
            version = (*versions, frozen.payload.version, adapter, self.scaling[adapter])
        return cache.evaluation_row(version, lambda: self.merged_weight(adapter), a.device)


class MergedLinear(torch.autograd.Function):
    """``y = x w^T + bias`` with w cast from the merged weight; gradients of x, A, B and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        layer: Float8Layer,
        w: QuantizedTensor,
        scaling: float,
    ) -> Tensor:
        y, saved = _product(x, w, bias, layer, wgrad=True)
        ctx.save_for_backward(saved, w.qdata, w.scale, a, b)
        ctx.layer, ctx.granularity, ctx.scaling = layer, w.granularity, scaling
        ctx.name = layer.fp8.name
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, qdata, scale, a, b = ctx.saved_tensors
        layer, (wants_x, wants_a, wants_b, wants_bias) = ctx.layer, ctx.needs_input_grad[:4]
        quantizer, dgrad = layer.fp8.quantizers(layer).grad_output, layer.fp8.recipe.dgrad
        of_bias = {"sum_dtype": ctx.bias_dtype if wants_bias else None}
        g8, _, grad_bias = quantizer(grad_output, rowwise=wants_x, columnwise=False, **of_bias)
        grad_x = grad_a = grad_b = None
        if layer.fp8.observer is not None:
            layer.fp8.observer.backward(grad_output, g8, None, None, None)
        if wants_x:
            w = transposed(QuantizedTensor(qdata, scale, ctx.granularity))  # (K, N)
            emulate, fast = layer.fp8.emulate, dgrad.fast_accum
            assert g8 is not None
            assert w is not None
            grad_x = scaled_matmul(g8, w, ctx.dtype, fast_accum=fast, emulate=emulate)
            grad_x = grad_x.view(ctx.shape)
        g = matrix(grad_output).to(x.dtype)  # (M, N); A is (R, K), B is (N, R)
        if wants_a:
            # ((M, N) @ (N, R))^T @ (M, K)
            grad_a = ((g @ b.to(x.dtype)).t() @ x).to(a.dtype) * ctx.scaling
        if wants_b:
            # (N, M) @ ((M, K) @ (K, R))
            grad_b = (g.t() @ (x @ a.to(x.dtype).t())).to(b.dtype) * ctx.scaling
        return grad_x, grad_a, grad_b, grad_bias, None, None, None


def _product(
    x: Tensor, w: QuantizedTensor, bias: Tensor | None, layer: Any, *, wgrad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return y (..., N), and x (M, K) in the dtype of y for the adapter's gradients, or None."""
    shape, dtype = x.shape, output_dtype(x)
    check_input(layer.fp8, x, layer.weight)
    quantizer, observer = layer.fp8.quantizers(layer).input, layer.fp8.observer
    if observer is not None and not wgrad:
        observer = observer.without_gradients(layer.training)
    needs = {"wgrad": wgrad, "fp8_wgrad": False, "dtype": dtype, "observer": observer}
    payloads = quantize_input(quantizer, x, **needs)
    assert payloads.rowwise is not None
    fast, emulate = layer.fp8.recipe.fprop.fast_accum, layer.fp8.emulate
    bias = None if bias is None else cast(bias, dtype)
    y = scaled_matmul(payloads.rowwise, w, dtype, bias=bias, fast_accum=fast, emulate=emulate)
    return y.view(*shape[:-1], y.shape[-1]), payloads.qdata  # (M, N) -> (..., N)


def make_merge_aware(model: nn.Module) -> int:
    """Make the LoRA layers of a converted model multiply by merged weights; return their number.

    Adapters over layers that are not in FP8 do not change.

    Args:
        model: converted model whose frozen weights are stored as FP8 only.
    Raises:
        ValueError: no FP8 layer has a LoRA adapter, or an adapter cannot be merged into one weight;
            the message names it.
    """
    count = 0
    for name, module in model.named_modules():
        name = unwrapped_name(name)
        base = own_child(module, "base_layer")
        if not isinstance(base, Float8Layer):
            continue
        _take(name, module, base)
        if not isinstance(module, MergeAware):
            add_mixin(module, MergeAware)
        count += 1
    if not count:
        raise ValueError(
            "FP8Config(merge_aware=True) trains LoRA on an FP8 base, and no FP8 layer of "
            f"{type(model).__name__} has an adapter: wrap the model with PEFT (get_peft_model, "
            "peft_config=) before you prepare it, or leave merge_aware out"
        )
    return count


def stop_merge_aware(model: nn.Module) -> None:
    """Undo `make_merge_aware`."""
    for module in model.modules():
        if isinstance(module, MergeAware):
            remove_mixin(module, MergeAware)
            module.__dict__.pop("fp8_adapters", None)


def _take(name: str, module: Any, base: Float8Layer) -> None:
    """Note that the adapters of a layer can be merged.

    Raises:
        ValueError: an adapter cannot be merged; the message names it.
    """
    reason = _why_not(module, base)
    if reason:
        raise ValueError(
            f"FP8Config(merge_aware=True): '{name}' {reason}; or leave merge_aware out"
        )
    vars(module)["fp8_adapters"] = set(module.lora_A)


def _dropout(module: Any, adapter: str) -> float:
    return float(getattr(module.lora_dropout[adapter], "p", 0))


def _why_not(module: Any, base: Float8Layer) -> str | None:
    """Return why adapter and base cannot be one FP8 weight, with advice, or None if they can."""
    kinds = (getattr(module, "lora_A", None), getattr(module, "lora_B", None))
    if not all(isinstance(kind, nn.ModuleDict) and len(kind) for kind in kinds):
        return f"is a {type(module).__name__}, not LoRA; use LoraConfig"
    names = ("lora_variant", "use_dora", "lora_bias")
    variants, doras, biases = (getattr(module, name, None) or {} for name in names)
    for adapter in module.lora_A:
        if variants.get(adapter) or doras.get(adapter):
            return "uses DoRA or another variant that does more than add; use plain LoRA"
        if biases.get(adapter):
            return "trains a LoRA bias, which is not part of the weight; set lora_bias=False"
        if _dropout(module, adapter):
            return (
                f"has lora_dropout={_dropout(module, adapter)}, and dropout before the "
                "adapter only cannot be merged into one weight; set lora_dropout=0"
            )
        if type(module.lora_A[adapter]) is not nn.Linear:
            return f"has an adapter of {type(module.lora_A[adapter]).__name__}; use plain LoRA"
    if base.fp8.transposed:
        return "adapts a Conv1D, which engines cannot load in FP8; adapt nn.Linear layers"
    if base.frozen_weight is None:
        return "has a base that is trained, or not stored in FP8 only; freeze it"
    if base.frozen_weight is not base.weight:
        return "has a base that is sharded; train it under DDP or on one device"
    return None
