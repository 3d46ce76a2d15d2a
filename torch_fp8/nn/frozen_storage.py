"""`FrozenStorage`: the part of a layer that can hold its weight in FP8 alone.

A frozen layer multiplies by the very bytes that it holds
(`torch_fp8.tensor.frozen_weight.Float8FrozenWeight`), with block scales whatever recipe it ran
before, and has no wgrad. ``state_dict`` has a plain BF16 tensor under the weight's own key, made on
the CPU one weight after the other, so that the device never holds a second copy of the model; what
is loaded, is quantized.
"""

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.frozen_payload import DTYPE, FrozenPayload, freeze_tensor
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight, frozen_parameter


class ThawNotice:
    """What weights share that were frozen together: which warnings of them have been given.

    Attributes:
        given: whether the user was told that some weights thaw.
        lost: whether the user was told that FP8 is too coarse for a change that somebody makes.
    """

    given = False
    lost = False


@dataclass(eq=False)
class FrozenState:
    """What a layer remembers of a weight that is stored as FP8 alone.

    Attributes:
        recipe: the recipe that the layer has again when it is thawed.
        notice: what the weights share that were frozen together.
        unmerged: the bytes of the weight without the adapters that are merged into it.
    """

    recipe: Recipe
    notice: ThawNotice | None = None
    unmerged: FrozenPayload | None = None


class FrozenStorage(RunsFP8):
    """The part of a layer that holds a weight which nobody trains.

    Attributes:
        fp8_unread: whether ``state_dict`` has the frozen weight itself; see `left_unread`.
    """

    fp8_unread = False
    bias: nn.Parameter | None
    weight: nn.Parameter

    def configure(self, name: str, config: Any, recipe: Recipe, emulate: bool) -> None:
        """Run `recipe` from now on; see `torch_fp8.nn.linear.Float8Layer`."""
        raise NotImplementedError

    @property
    def frozen_weight(self) -> Float8FrozenWeight | None:
        """The weight, or this rank's shard of it, if it is held in FP8 alone."""
        weight = self._parameters.get("weight")
        shard = None if weight is None else local(weight)
        return shard if isinstance(shard, Float8FrozenWeight) else None

    @property
    def thaw_notice(self) -> ThawNotice | None:
        """What the weight shares with those that were frozen together with it."""
        state = self.fp8.frozen
        return None if state is None else state.notice

    def freeze_weight(
        self,
        recipe: Recipe,
        emulate: bool,
        notice: ThawNotice | None,
        payload: FrozenPayload | None = None,
    ) -> None:
        """Hold the weight in FP8 alone from now on; who holds the Parameter holds the new one.

        Args:
            recipe: the frozen layer's recipe; its weights have scales of blocks or one per tensor.
            emulate: run its GEMMs through the reference path.
            notice: what the weights share that are frozen together.
            payload: the bytes, where somebody has quantized them already; None: of the weight.
        """
        weight = self.weight
        name = f"{self.fp8.name}.weight".lstrip(".")
        if payload is None:
            payload = freeze_tensor(local(weight), recipe.weight, name)
        payload.name = name
        del weight  # or the Parameter could not be replaced
        self._hold(payload)
        self.run_frozen(recipe, emulate, notice)

    def _hold(self, payload: FrozenPayload) -> None:
        payload.owner = weakref.ref(self)
        replace_parameter(self, frozen_parameter(payload))

    def run_frozen(self, recipe: Recipe, emulate: bool, notice: ThawNotice | None) -> None:
        """Run the recipe of frozen layers; the shards of a weight follow when FSDP2 is connected.

        Args:
            recipe, emulate, notice: as of `freeze_weight`.
        """
        fp8 = self.fp8
        if fp8.frozen is None:
            fp8.frozen = FrozenState(fp8.recipe)
        fp8.frozen.notice = notice
        recipe = replace(recipe, smooth=fp8.frozen.recipe.smooth)
        self.configure(fp8.name, fp8.config, recipe, emulate)

    def thaw_weight(self, dtype: torch.dtype | None = None) -> None:
        """Give the weight its dtype back, or `dtype`, and the layer its recipe.

        The Parameter stays the same object, and does not require gradients.

        Raises:
            RuntimeError: it is sharded.
        """
        fp8, frozen = self.fp8, self.frozen_weight
        if fp8.frozen is None:
            return
        if frozen is not None:
            self._refuse_sharded(frozen)
            dtype = frozen.payload.thawed_dtype if dtype is None else dtype
            plain = frozen.dequantize().to(dtype)
            replace_parameter(self, nn.Parameter(plain, requires_grad=False))
        recipe, fp8.frozen = fp8.frozen.recipe, None
        self.configure(fp8.name, fp8.config, recipe, fp8.emulate)

    def _refuse_sharded(self, frozen: Float8FrozenWeight) -> None:
        if frozen is not self.weight:
            raise RuntimeError(
                f"'{self.fp8.name}.weight' is stored as FP8 alone and sharded by FSDP2, which "
                "takes no other weight in its place; thaw the model before fully_shard, or convert "
                "it with FP8Config(frozen_weights='keep')"
            )

    def thaw_for_training(self) -> None:
        """Thaw the weight because somebody has asked for its gradient, and say so once."""
        notice = self.thaw_notice
        self.thaw_weight()
        self.weight.requires_grad_(True)
        if notice is not None and notice.given:
            return
        warnings.warn(
            f"'{self.fp8.name}.weight' was stored as FP8 alone and is to be trained from now on: "
            f"it is {self.weight.dtype} again, with the values that FP8 held, and so will the "
            "others be whose gradients are asked for. FP8Config(frozen_weights='keep') leaves such "
            "weights as they are",
            stacklevel=3,
        )
        if notice is not None:
            notice.given = True

    def begin_merge(self) -> bool:
        """Make a frozen weight plain float32, for an adapter that is to be merged into it.

        Its bytes are kept until `end_merge` gives them back, or `forget_unmerged` lets them go.

        Returns:
            Whether the weight is, or was before an earlier merge, frozen.
        """
        state, frozen = self.fp8.frozen, self.frozen_weight
        if state is None or (frozen is None and state.unmerged is None):
            return False
        if frozen is not None:
            self._refuse_sharded(frozen)
            state.unmerged = frozen.payload
        plain = self.weight.detach().float()
        replace_parameter(self, nn.Parameter(plain, requires_grad=False))
        return True

    def end_merge(self, merged: bool) -> None:
        """Round a weight that has adapters merged into it once, to BF16; or give back its bytes.

        Args:
            merged: whether an adapter is merged into it.
        """
        if merged:
            replace_parameter(self, nn.Parameter(self.weight.to(DTYPE), requires_grad=False))
            return
        state = self.fp8.frozen
        self._hold(state.unmerged)
        state.unmerged = None

    def forget_unmerged(self) -> None:
        """Let the bytes go that a weight had before adapters were merged into it, for good."""
        if self.fp8.frozen is not None and self.fp8.frozen.unmerged is not None:
            self.thaw_weight()

    def dequantized_forward(self, x: Tensor) -> Tensor:
        """Compute y (..., N) in high precision, in the dtype of x (..., K), or of autocast."""
        weight: Tensor = self.weight
        if isinstance(weight, QuantizableTensor):
            weight = weight.dequantize()
        weight = weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, weight.t() if self.fp8.transposed else weight, bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A dtype is asked of floating tensors alone: bytes and the bits of scales only move.
        frozen, weight = self.frozen_weight, self._parameters.get("weight")
        if frozen is None:
            return super()._apply(fn, recurse)
        self._parameters["weight"] = None  # which keeps its place among the others
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"] = weight
        payload = frozen.payload
        qdata = fn(payload.qdata.view(torch.uint8)).view(payload.qdata.dtype)
        scale = fn(payload.scale.view(torch.int32)).view(torch.float32)
        if qdata.device == frozen.device:
            payload.qdata, payload.scale = qdata, scale
        elif frozen is not weight:
            self._refuse_sharded(frozen)
        else:
            moved = replace(payload, qdata=qdata, scale=scale, sharers=None)
            replace_parameter(self, frozen_parameter(moved))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        frozen = self.frozen_weight
        if frozen is not None and not (keep_vars or self.fp8_unread):
            destination[prefix + "weight"] = _plain(self.weight, frozen)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        frozen, key = self.frozen_weight, prefix + "weight"
        given = state_dict.get(key)
        whole = frozen is self._parameters.get("weight")
        if frozen is None or not whole or not isinstance(given, Tensor):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
            return
        if given.shape == frozen.shape:
            if frozen.is_meta and not given.is_meta:  # to be assigned
                fp8, old = self.fp8, frozen.payload
                payload = freeze_tensor(given, fp8.recipe.weight, old.name, old.thawed_dtype)
                self.freeze_weight(fp8.recipe, fp8.emulate, self.thaw_notice, payload)
            else:
                frozen.copy_(given)
            given = self.weight  # nothing is left to copy, or to assign in its place
        super()._load_from_state_dict({**state_dict, key: given}, prefix, local_metadata, *others)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        frozen = self.frozen_weight
        if frozen is not None:
            frozen.payload.owner = weakref.ref(self)


@contextlib.contextmanager
def left_unread(model: nn.Module) -> Iterator[None]:
    """Have ``state_dict`` of `model` hold frozen weights as they are, in the with block.

    It is for who takes few values of it: of those `plain_copy` makes what is to be saved.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "fp8_unread")]
    for layer in layers:
        layer.fp8_unread = True
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("fp8_unread", None)


@torch.no_grad()
def plain_copy(value: Any) -> Any:
    """Return what a state dict has of a frozen weight, or of a shard of one; others as they are."""
    frozen = local(value) if isinstance(value, Tensor) else None
    return _plain(value, frozen) if isinstance(frozen, Float8FrozenWeight) else value


def replace_parameter(layer: nn.Module, new: nn.Parameter, name: str = "weight") -> None:
    """Put `new` in the place of a layer's weight `name`, for everybody who holds that.

    Where weak references forbid it, the layer alone has the new one, and the old one is emptied.
    """
    old = layer._parameters[name]
    assert old is not None
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        layer._parameters[name] = new
        if not isinstance(old, Float8FrozenWeight):
            old.data = old.data.new_empty(0)


@torch.no_grad()
def _plain(weight: Tensor, frozen: Float8FrozenWeight) -> Tensor:
    """A plain BF16 tensor of a frozen weight, or of this rank's shard; on the CPU."""
    plain = frozen.dequantize()
    return plain.cpu() if weight is frozen else with_data(weight, plain)
