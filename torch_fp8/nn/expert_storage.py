"""`ExpertStorage`: the part of an expert module that can hold its weights in FP8 alone.

A frozen weight (E, R, C) takes one byte an element and a scale a row
(`torch_fp8.tensor.frozen_weight.Float8FrozenWeight`). The GEMM that contracts its last dimension
takes the very bytes. The other one takes them transposed, with new scales for each expert. Scales
are powers of two, so that exponents shift and only what falls below the least number is lost.
``state_dict`` has plain BF16 tensors, as `torch_fp8.nn.frozen_storage` has them.
"""

import warnings
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.config import FP8Config
from torch_fp8.nn.expert_cache import StackedCache
from torch_fp8.nn.frozen_storage import plain_copy, replace_parameter
from torch_fp8.ops.moe_rows import transpose_groups
from torch_fp8.ops.quantize import QuantizedTensor, dequantize, quantize
from torch_fp8.quantization.formats import GEMM_ALIGNMENT
from torch_fp8.quantization.recipe import CastSpec, Recipe
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.frozen_payload import DTYPE, FrozenPayload, freeze_tensor
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight, frozen_parameter


def transposed_stacked(x: QuantizedTensor, spec: CastSpec) -> QuantizedTensor:
    """Return stacked weights (E, R, C), with a scale a row, as (E, C, R) with scales (E, C, 1)."""
    if x.qdata.is_cuda and x.qdata.shape[1] % GEMM_ALIGNMENT == 0:
        return transposed_at_once(x)
    experts, rows, cols = x.qdata.shape
    qdata = x.qdata.new_empty(experts, cols, rows)
    scale = x.scale.new_empty(experts, cols, 1)
    for i in range(experts):  # one expert at a time exists in float32
        values = dequantize(x._replace(qdata=x.qdata[i], scale=x.scale[i]))
        turned = quantize(values.t(), spec)
        qdata[i].view(torch.uint8).copy_(turned.qdata.view(torch.uint8))
        scale[i] = turned.scale
    return x._replace(qdata=qdata, scale=scale)


def transposed_at_once(x: QuantizedTensor) -> QuantizedTensor:
    """Compute `transposed_stacked` by the kernels that transpose groups of tokens, as bytes.

    Args:
        x: see `transposed_stacked`; R is a multiple of 16.
    """
    experts, rows, cols = x.qdata.shape
    ends = torch.arange(1, experts + 1, device=x.qdata.device, dtype=torch.int32) * rows
    flat = x._replace(qdata=x.qdata.flatten(0, 1), scale=x.scale.reshape(-1, 1))
    turned = transpose_groups(flat, ends)  # (C, E * R) with scales (E, C)
    codes = turned.qdata.view(torch.uint8).view(cols, experts, rows)
    qdata = codes.transpose(0, 1).contiguous().view(x.qdata.dtype)  # (E, C, R)
    return x._replace(qdata=qdata, scale=turned.scale[..., None])


@dataclass
class ExpertsFP8:
    """What conversion leaves in a module of experts.

    Attributes:
        name: qualified, for errors.
        config: the configuration of the model, or of this module.
        recipe: the recipe of experts.
        emulate: whether the GEMMs run through the reference path.
        observers: monitors of the weights by name, which see the operands of the GEMMs
            (`torch_fp8.monitor.expert_observer.ExpertObserver`); None: nobody looks.
        tokens: monitor's counter of each expert's tokens, or None.
        caches: what is kept of the weights in FP8, by name.
        frozen: whether the weights are held in FP8 alone, by a rank of FSDP2 as well.
    """

    name: str
    config: FP8Config
    recipe: Recipe
    emulate: bool
    observers: dict[str, Any] | None = None
    tokens: Any = None
    caches: dict[str, StackedCache] = field(default_factory=dict)
    frozen: bool = False

    @property
    def cached_bytes(self) -> int:
        """The bytes that are kept of the weights now."""
        return sum(t.nbytes for cache in self.caches.values() for t in cache.tensors)


class ExpertStorage(RunsFP8):
    """The part of an expert module that holds weights which nobody trains.

    Attributes:
        fp8_unread: whether ``state_dict`` has the frozen weights themselves.
        fp8_unmerged: the bytes of weights into which adapters are merged, by name.
    """

    fp8: ExpertsFP8
    fp8_unread = False
    fp8_unmerged: dict[str, FrozenPayload] | None = None

    @property
    def fp8_weight_names(self) -> tuple[str, ...]:
        """The names of the weights that run in FP8."""
        raise NotImplementedError

    @property
    def frozen_weights(self) -> dict[str, Float8FrozenWeight]:
        """The weights that are held in FP8 alone, by name."""
        named = {name: self._parameters.get(name) for name in self.fp8_weight_names}
        return {name: w for name, w in named.items() if isinstance(w, Float8FrozenWeight)}

    def freeze_weights(self) -> None:
        """Hold the weights in FP8 alone from now on; a repeated call changes nothing.

        Those that FSDP2 has sharded wait for `torch_fp8.distributed.fsdp.connect.connect_fsdp`.
        """
        self.fp8.frozen = True
        for name in self.fp8_weight_names:
            weight = self._parameters.get(name)
            if weight is None or isinstance(weight, Float8FrozenWeight | DTensor):
                continue
            full = f"{self.fp8.name}.{name}".lstrip(".")
            payload = freeze_tensor(weight, self.fp8.recipe.weight, full)
            del weight  # or the Parameter could not be replaced
            self._hold(name, payload)

    def _hold(self, name: str, payload: FrozenPayload) -> None:
        if name in self.fp8.caches:
            self.fp8.caches[name].forget()
        payload.owner = weakref.ref(self)
        replace_parameter(self, frozen_parameter(payload), name)

    def thaw_weights(self) -> int:
        """Give the weights their dtype back, with the values that FP8 held; return how many.

        Raises:
            RuntimeError: FSDP2 has sharded them.
        """
        held = [name for name in self.fp8_weight_names if _is_sharded(self._parameters.get(name))]
        if held:
            raise RuntimeError(
                f"'{self.fp8.name}.{held[0]}' is stored as FP8 alone and sharded by FSDP2, which "
                "cannot be undone: thaw the model before fully_shard"
            )
        if "fp8" in vars(self):
            self.fp8.frozen = False
        self.fp8_unmerged = None
        frozen = self.frozen_weights
        for name, weight in frozen.items():
            plain = weight.dequantize().to(weight.payload.thawed_dtype)
            replace_parameter(self, nn.Parameter(plain, requires_grad=False), name)
        return len(frozen)

    def thaw_for_training(self) -> None:
        """Thaw the weights because somebody has asked for the gradient of one, and say so."""
        names = list(self.frozen_weights)
        self.thaw_weights()
        for name in names:
            getattr(self, name).requires_grad_(True)
        warnings.warn(
            f"the weights of '{self.fp8.name}' were stored as FP8 alone and are to be trained from "
            "now on: they have their dtype again, with the values that FP8 held. "
            "FP8Config(frozen_weights='keep') leaves such weights as they are",
            stacklevel=3,
        )

    def begin_merge(self, name: str) -> bool:
        """Make a frozen weight plain float32, for an adapter that is to be merged into it.

        Returns:
            Whether the weight is, or was before an earlier merge, frozen.
        """
        unmerged = self.fp8_unmerged or {}
        frozen = self.frozen_weights.get(name)
        if frozen is None and name not in unmerged:
            return False
        if frozen is not None:
            self.fp8_unmerged = {**unmerged, name: frozen.payload}
        plain = getattr(self, name).detach().float()
        replace_parameter(self, nn.Parameter(plain, requires_grad=False), name)
        return True

    def end_merge(self, name: str, merged: bool) -> None:
        """Round a weight that has adapters merged into it to BF16; or give back its bytes.

        Args:
            name: the name of the weight.
            merged: whether an adapter is merged into it.
        """
        if merged:
            plain = getattr(self, name).to(DTYPE)
            replace_parameter(self, nn.Parameter(plain, requires_grad=False), name)
            return
        unmerged = dict(self.fp8_unmerged or {})
        self._hold(name, unmerged.pop(name))
        self.fp8_unmerged = unmerged or None

    def forget_unmerged(self) -> None:
        """Let the bytes go that weights had before adapters were merged into them, for good."""
        self.fp8_unmerged = None

    def train(self, mode: bool = True) -> "ExpertStorage":
        for cache in self.fp8.caches.values() if mode else ():
            cache.forget_evaluation()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for cache in self.fp8.caches.values():
            cache.forget()  # of another device or dtype soon
        # A dtype is asked of floating tensors alone: bytes and the bits of scales only move.
        frozen = {name: self._parameters[name] for name in self.frozen_weights}
        self._parameters.update(dict.fromkeys(frozen))
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(frozen)
        for name, weight in self.frozen_weights.items():
            payload = weight.payload
            qdata = fn(payload.qdata.view(torch.uint8)).view(payload.qdata.dtype)
            scale = fn(payload.scale.view(torch.int32)).view(torch.float32)
            self._hold(name, replace(payload, qdata=qdata, scale=scale, sharers=None))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not (keep_vars or self.fp8_unread):
            for name, weight in self.frozen_weights.items():
                destination[prefix + name] = plain_copy(weight)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        given = dict(state_dict)
        for name, weight in self.frozen_weights.items():
            value = given.get(prefix + name)
            if not isinstance(value, Tensor) or value.shape != weight.shape:
                continue
            if weight.is_meta and not value.is_meta:  # to be assigned
                payload = weight.payload
                loaded = freeze_tensor(value, payload.spec, payload.name, payload.thawed_dtype)
                self._hold(name, loaded)
            else:
                weight.copy_(value)
            given[prefix + name] = getattr(self, name)  # nothing is left to copy
        super()._load_from_state_dict(given, prefix, local_metadata, *others)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for weight in self.frozen_weights.values():
            weight.payload.owner = weakref.ref(self)


def _is_sharded(weight: Tensor | None) -> bool:
    """Return whether a weight is a shard that is held in FP8 alone."""
    return isinstance(weight, DTensor) and isinstance(local(weight), Float8FrozenWeight)
