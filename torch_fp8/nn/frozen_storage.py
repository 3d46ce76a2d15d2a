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
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fp8.nn.scaling_buffers import ScalingBuffers
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


class FrozenStorage(ScalingBuffers):
    """The part of a layer that holds a weight which nobody trains.

    Attributes:
        fp8_thawed_recipe: the recipe that the layer has again when it is thawed; None: its weight
            is not frozen.
        fp8_thaw_notice: what the weights share that were frozen together.
        fp8_unmerged: the bytes of the weight without the adapters that are merged into it.
        fp8_unread: whether ``state_dict`` has the frozen weight itself; see `left_unread`.
    """

    fp8_thawed_recipe: Recipe | None = None
    fp8_thaw_notice: "ThawNotice | None" = None
    fp8_unmerged: FrozenPayload | None = None
    fp8_unread = False
    fp8_name: str
    fp8_emulate: bool
    fp8_transposed: bool = False
    """Whether the weight is stored as (K, N)."""
    bias: nn.Parameter | None

    def configure(self, name: str, config: Any, recipe: Recipe, emulate: bool) -> None:
        """Run `recipe` from now on; see `torch_fp8.nn.linear.Float8Layer`."""
        raise NotImplementedError

    @property
    def frozen_weight(self) -> Float8FrozenWeight | None:
        """The weight, or this rank's shard of it, if it is held in FP8 alone."""
        weight = self._parameters.get("weight")
        shard = None if weight is None else local(weight)
        return shard if isinstance(shard, Float8FrozenWeight) else None

    def freeze_weight(
        self, recipe: Recipe, emulate: bool, payload: FrozenPayload | None = None
    ) -> None:
        """Hold the weight in FP8 alone from now on; who holds the Parameter holds the new one.

        Args:
            recipe: the frozen layer's recipe; its weights have scales of blocks or one per tensor.
            emulate: run its GEMMs through the reference path.
            payload: the bytes, where somebody has quantized them already; None: of the weight.
        """
        weight = self.weight
        name = f"{self.fp8_name}.weight".lstrip(".")
        if payload is None:
            payload = freeze_tensor(local(weight), recipe.weight, name)
        payload.name, payload.owner = name, weakref.ref(self)
        replace_parameter(self, frozen_parameter(payload))
        self.run_frozen(recipe, emulate)

    def run_frozen(self, recipe: Recipe, emulate: bool) -> None:
        """Run the recipe of frozen layers; the shards of a weight follow when FSDP2 is connected.

        Args:
            recipe, emulate: as of `freeze_weight`.
        """
        before = self.fp8_recipe if self.fp8_thawed_recipe is None else self.fp8_thawed_recipe
        self.drop_scaling()
        recipe = replace(recipe, smooth=before.smooth)
        self.configure(self.fp8_name, self.fp8_config, recipe, emulate)
        self.fp8_thawed_recipe = before

    def thaw_weight(self, dtype: torch.dtype | None = None) -> None:
        """Give the weight its dtype back, or `dtype`, and the layer its recipe.

        The Parameter stays the same object, and does not require gradients.

        Raises:
            RuntimeError: it is sharded.
        """
        recipe, frozen = self.fp8_thawed_recipe, self.frozen_weight
        if recipe is None:
            return
        if frozen is not None:
            self._refuse_sharded(frozen)
            dtype = frozen.payload.thawed_dtype if dtype is None else dtype
            plain = frozen.dequantize().to(dtype)
            replace_parameter(self, nn.Parameter(plain, requires_grad=False))
        self.drop_scaling()
        for name in ("fp8_thawed_recipe", "fp8_thaw_notice", "fp8_unmerged"):
            self.__dict__.pop(name, None)
        self.configure(self.fp8_name, self.fp8_config, recipe, self.fp8_emulate)

    def _refuse_sharded(self, frozen: Float8FrozenWeight) -> None:
        if frozen is not self.weight:
            raise RuntimeError(
                f"'{self.fp8_name}.weight' is stored as FP8 alone and sharded by FSDP2, which "
                "takes no other weight in its place; thaw the model before fully_shard, or convert "
                "it with FP8Config(frozen_weights='keep')"
            )

    def thaw_for_training(self) -> None:
        """Thaw the weight because somebody has asked for its gradient, and say so once."""
        notice = self.fp8_thaw_notice
        self.thaw_weight()
        self.weight.requires_grad_(True)
        if notice is not None and notice.given:
            return
        warnings.warn(
            f"'{self.fp8_name}.weight' was stored as FP8 alone and is to be trained from now on: "
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
        frozen = self.frozen_weight
        if frozen is None and self.fp8_unmerged is None:
            return False
        if frozen is not None:
            self._refuse_sharded(frozen)
            self.fp8_unmerged = frozen.payload
        plain = self.weight.detach().float()
        replace_parameter(self, nn.Parameter(plain, requires_grad=False))
        return True

    def end_merge(self, merged: bool) -> None:
        """Round a weight that has adapters merged into it once, to BF16; or give back its bytes.

        Args:
            merged: whether an adapter is merged into it.
        """
        payload = self.fp8_unmerged
        assert payload is not None
        if merged:
            replace_parameter(self, nn.Parameter(self.weight.to(DTYPE), requires_grad=False))
            return
        payload.owner = weakref.ref(self)
        replace_parameter(self, frozen_parameter(payload))
        del self.fp8_unmerged

    def forget_unmerged(self) -> None:
        """Let the bytes go that a weight had before adapters were merged into it, for good."""
        if self.fp8_unmerged is not None:
            self.thaw_weight()

    def dequantized_forward(self, x: Tensor) -> Tensor:
        """Compute y (..., N) in high precision, in the dtype of x (..., K), or of autocast."""
        weight: Tensor = self.weight
        if isinstance(weight, QuantizableTensor):
            weight = weight.dequantize()
        weight = weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, weight.t() if self.fp8_transposed else weight, bias)

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
                payload, recipe = frozen.payload, self.fp8_recipe
                weight = freeze_tensor(given, recipe.weight, payload.name, payload.thawed_dtype)
                self.freeze_weight(recipe, self.fp8_emulate, weight)
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
