"""`FrozenStorage`: the part of a converted module that can store its weights as FP8 only.

A frozen layer multiplies by the bytes that it stores
(`torch_fp8.tensor.frozen_weight.Float8FrozenWeight`), with block scales whatever its recipe was
before, and runs no wgrad. A module of experts stores stacked weights (E, R, C) with one scale per
row. ``state_dict`` returns plain BF16 tensors under the same keys. It dequantizes one weight at a
time onto the CPU, so that the device never holds a second copy of the model. Loading quantizes.
"""

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.base import dequantized
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.frozen_payload import FrozenPayload, freeze_tensor
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight, frozen_parameter
from torch_fp8.tensor.readable import refuse_swap


class ThawNotice:
    """Flags for warnings that are given once for all weights that were frozen together.

    Attributes:
        given: whether a warning reported that weights thaw.
        lost: whether a warning reported that FP8 is too coarse for a change of a weight.
    """

    given = False
    lost = False


@dataclass(eq=False)
class FrozenState:
    """State of a module whose weights are stored as FP8 only.

    Attributes:
        recipe: recipe to which the module returns when it is thawed.
        notice: flags shared with the weights that were frozen together with these.
        unmerged: payloads, by name, of weights from before adapters were merged into them.
    """

    recipe: Recipe
    notice: ThawNotice | None = None
    unmerged: dict[str, FrozenPayload] = field(default_factory=dict)


class FrozenStorage(RunsFP8):
    """Mixin of a module that can store frozen weights as FP8 only.

    Attributes:
        fp8_unread: whether ``state_dict`` returns the frozen weights themselves; see `left_unread`.
    """

    fp8_weight_names = ("weight",)
    fp8_unread = False
    bias: nn.Parameter | None
    weight: nn.Parameter

    def run_recipe(self, recipe: Recipe, emulate: bool) -> None:
        """Run `recipe` from now on, with new, empty state.

        Args:
            recipe: recipe of frozen weights, or the module's earlier one.
            emulate: whether GEMMs run through the reference path.
        """
        raise NotImplementedError

    @property
    def frozen_weights(self) -> dict[str, Float8FrozenWeight]:
        """Weights, or this rank's shards of them, that are stored as FP8 only, by name."""
        shards = {name: local(self._parameters.get(name)) for name in self.fp8_weight_names}
        return {n: shard for n, shard in shards.items() if isinstance(shard, Float8FrozenWeight)}

    @property
    def frozen_weight(self) -> Float8FrozenWeight | None:
        """Weight of a layer, or this rank's shard of it, if it is stored as FP8 only; else None."""
        return self.frozen_weights.get("weight")

    @property
    def thaw_notice(self) -> ThawNotice | None:
        """Warning flags shared with the weights that were frozen together with these."""
        state = self.fp8.frozen
        return None if state is None else state.notice

    def freeze_weights(
        self,
        recipe: Recipe,
        emulate: bool,
        notice: ThawNotice | None,
        payload: FrozenPayload | None = None,
    ) -> None:
        """Store the weights as FP8 only from now on. The Parameters stay the same objects.

        Sharded weights follow when FSDP2 is connected
        (`torch_fp8.distributed.fsdp.connect.connect_fsdp`).

        Args:
            recipe: recipe of the frozen module; a layer's weight gets block scales or a single one.
            emulate: whether GEMMs run through the reference path.
            notice: warning flags for all weights that are frozen together.
            payload: bytes of the module's only weight, if it is already quantized, or None to
                quantize.
        """
        for name in self.fp8_weight_names:
            weight = self._parameters.get(name)
            known = isinstance(weight, DTensor) or name in self.frozen_weights
            if weight is None or (payload is None and known):
                continue
            full = f"{self.fp8.name}.{name}".lstrip(".")
            held = freeze_tensor(weight, recipe.weight, full) if payload is None else payload
            held.name = full
            del weight  # a further reference would prevent swapping the Parameter
            self._hold(name, held)
        self.run_frozen(recipe, emulate, notice)

    def _hold(self, name: str, payload: FrozenPayload) -> None:
        payload.owner = weakref.ref(self)
        replace_parameter(self, frozen_parameter(payload), name)

    def run_frozen(self, recipe: Recipe, emulate: bool, notice: ThawNotice | None) -> None:
        """Run the recipe of frozen weights.

        Args:
            recipe, emulate, notice: arguments of `freeze_weights`.
        """
        fp8 = self.fp8
        if fp8.frozen is None:
            fp8.frozen = FrozenState(fp8.recipe)
        fp8.frozen.notice = notice
        self.run_recipe(replace(recipe, smooth=fp8.frozen.recipe.smooth), emulate)

    def thaw_weights(self) -> int:
        """Give the weights their dtype back, and the module its earlier recipe.

        The Parameters stay the same objects, and do not require gradients.

        Returns:
            The number of weights that were thawed.
        Raises:
            RuntimeError: a weight is sharded.
        """
        fp8, frozen = self.fp8, self.frozen_weights
        if fp8.frozen is None:
            return 0
        for name, weight in frozen.items():
            self._refuse_sharded(name, weight)
            plain = weight.dequantize().to(weight.payload.thawed_dtype)
            replace_parameter(self, nn.Parameter(plain, requires_grad=False), name)
        recipe, fp8.frozen = fp8.frozen.recipe, None
        self.run_recipe(recipe, fp8.emulate)
        return len(frozen)

    def _refuse_sharded(self, name: str, frozen: Float8FrozenWeight) -> None:
        if frozen is not self._parameters[name]:
            raise RuntimeError(
                f"'{self.fp8.name}.{name}' is stored in FP8 only and sharded by FSDP2, which "
                "cannot replace the weight; thaw the model before fully_shard, or convert it with "
                "FP8Config(frozen_weights='keep')"
            )

    def thaw_for_training(self) -> None:
        """Thaw the weights because code asked for their gradients, and warn once."""
        notice, names = self.thaw_notice, tuple(self.frozen_weights)
        self.thaw_weights()
        for name in names:
            self._parameters[name].requires_grad_(True)
        if notice is not None and notice.given:
            return
        for name in names[:1]:
            warnings.warn(
                f"'{self.fp8.name}.{name}' was stored in FP8 only and is trained from now on: it "
                f"is {self._parameters[name].dtype} again, with the values it had in FP8, and so "
                "is every other weight whose gradient you enable. FP8Config(frozen_weights='keep') "
                "leaves such weights unchanged",
                stacklevel=3,
            )
        if notice is not None:
            notice.given = True

    def begin_merge(self, name: str = "weight") -> bool:
        """Make a frozen weight plain float32, so that an adapter can be merged into it.

        The module keeps the bytes until `end_merge` restores or `forget_unmerged` drops them.

        Args:
            name: name of the weight.
        Returns:
            Whether the weight is frozen, or was frozen before an earlier merge.
        """
        state, frozen = self.fp8.frozen, self.frozen_weights.get(name)
        if state is None or (frozen is None and name not in state.unmerged):
            return False
        if frozen is not None:
            self._refuse_sharded(name, frozen)
            state.unmerged[name] = frozen.payload
        plain = self._parameters[name].data.float()  # the profiler would record detach()
        replace_parameter(self, nn.Parameter(plain, requires_grad=False), name)
        return True

    def end_merge(
        self, merged: bool, name: str = "weight", *, values: torch.dtype | None = None
    ) -> None:
        """Round the float32 weight of `begin_merge` to its dtype, or restore its FP8 bytes.

        Args:
            merged: whether an adapter is merged into the weight now; if not, restore the bytes.
            name: name of the weight.
            values: dtype to which the values are rounded first, or None. The result has the dtype
                of the weight before it was frozen.
        """
        if merged:
            dtype = self.fp8.frozen.unmerged[name].thawed_dtype
            plain = self._parameters[name].data.to(values or dtype).to(dtype)
            replace_parameter(self, nn.Parameter(plain, requires_grad=False), name)
        else:
            self._hold(name, self.fp8.frozen.unmerged.pop(name))

    def forget_unmerged(self) -> None:
        """Drop the bytes that weights had before a merge, because it is permanent."""
        state = self.fp8.frozen
        if state is not None and state.unmerged:
            state.unmerged.clear()
            if not self.frozen_weights:
                self.thaw_weights()

    def dequantized_forward(self, x: Tensor) -> Tensor:
        """Compute y (..., N) in high precision, in the dtype of x (..., K) or of autocast."""
        weight = dequantized(self.weight).to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, weight.t() if self.fp8.transposed else weight, bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # `fn` converts floating dtypes only: as integers, codes and scales move unchanged.
        frozen = self.frozen_weights
        weights = {name: self._parameters[name] for name in frozen}
        self._parameters.update(dict.fromkeys(frozen))  # None keeps their order
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(weights)
        for name, weight in frozen.items():
            payload = weight.payload
            qdata = fn(payload.qdata.view(torch.uint8)).view(payload.qdata.dtype)
            scale = fn(payload.scale.view(torch.int32)).view(torch.float32)
            if qdata.device == weight.device:
                payload.qdata, payload.scale = qdata, scale
            else:
                self._refuse_sharded(name, weight)
                self._hold(name, replace(payload, qdata=qdata, scale=scale, sharers=None))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not (keep_vars or self.fp8_unread):
            for name in self.frozen_weights:
                destination[prefix + name] = plain_copy(self._parameters[name])

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        given = dict(state_dict)
        for name, weight in self.frozen_weights.items():
            value, whole = given.get(prefix + name), weight is self._parameters[name]
            if not whole or not isinstance(value, Tensor) or value.shape != weight.shape:
                continue
            if weight.is_meta and not value.is_meta:  # assign=True
                old = weight.payload
                self._hold(name, freeze_tensor(value, old.spec, old.name, old.thawed_dtype))
            else:
                weight.copy_(value)
            # The module's own Parameter leaves nothing to copy or assign.
            given[prefix + name] = self._parameters[name]
        super()._load_from_state_dict(given, prefix, local_metadata, *others)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.fp8 = copy(self.fp8)  # a shallow copy of the module shares the original's
        for weight in self.frozen_weights.values():
            weight.payload.owner = weakref.ref(self)


@contextlib.contextmanager
def left_unread(model: nn.Module) -> Iterator[None]:
    """Make ``state_dict`` of `model` return frozen weights as they are, in the ``with`` block.

    Use it to read only a few entries: convert each of them with `plain_copy`.
    """
    layers = [module for module in model.modules() if hasattr(module, "fp8_unread")]
    for layer in layers:
        layer.fp8_unread = True
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("fp8_unread", None)


@torch.no_grad()
def plain_copy(value: Any) -> Any:
    """Dequantize a frozen weight onto the CPU, or a shard on its device; return others as is."""
    frozen = local(value) if isinstance(value, Tensor) else None
    if not isinstance(frozen, Float8FrozenWeight):
        return value
    plain = frozen.dequantize()
    return plain.cpu() if value is frozen else with_data(value, plain)


def replace_parameter(layer: nn.Module, new: nn.Parameter, name: str = "weight") -> None:
    """Replace a layer's weight `name` by `new` for all references to the Parameter.

    If weak references prevent that, from Python or from torch.profiler, only the layer gets `new`,
    and the old Parameter is emptied.
    """
    old = layer._parameters[name]
    try:
        refuse_swap(old)  # torch would change the class before it refuses
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        layer._parameters[name] = new
        if not isinstance(old, Float8FrozenWeight):
            old.data = old.data.new_empty(0)
