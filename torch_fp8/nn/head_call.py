"""`HeadCall`: one forward of an output layer, whose logits are computed when they are read.

It keeps the layer's input and weight with the grad mode and the autocast state of the call, and
notices writes to them.

Legend: H hidden features, V classes.
"""

import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.nn.loss_head import Precision
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight
from torch_fp8.tensor.producer import await_step
from torch_fp8.tensor.split_weight import SplitWeight, stored

_PLAIN = (Tensor, nn.Parameter)


class HeadCall:
    """One forward of an output layer.

    Args:
        name: qualified name of the layer, for errors.
        hidden: input (..., H).
        weight: (V, H).
        bias: (V,) or None.
        precision: ``bf16`` or ``fp8``, that of the products.
        owner: the layer's state, with functions `gather`, which gathers a weight that FSDP2 has
            freed and returns the module to reshard; `sharded`, which returns the sharded parameter
            of a gathered weight, or None; and `note`, which gets the bytes of logits that were
            computed, 0 if a loss was fused, and the name of the function that read them.
        layer: the layer, with a function `product` of input, weight and bias.
        autocast: state of the call, see `autocast_state`, or None for the current one.

    Attributes:
        dtype: dtype of the logits.
        is_read: whether plain logits exist, so that everything else uses them.
        is_fused: whether a loss was computed without logits.
        is_observed: whether the monitor measures the layer in this step.
        is_lost: whether an optimizer has written the shards of a weight that FSDP2 had freed.
        reader: name of the function that reads the logits.
        begins: hooks of FSDP2 and Fabric that run when the backward of the logits begins.
        logits: all logits that were recorded and still exist.
    """

    def __init__(
        self,
        name: str,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        precision: Precision,
        owner: Any,
        layer: Any,
        autocast: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.hidden, self.weight, self.bias = name, hidden, weight, bias
        self.owner, self.note, self.layer, self.linear = owner, owner.note, layer, layer.product
        self.parameter = layer._parameters.get("weight", weight)  # of which `weight` may be a half
        self.precision = precision
        self.autocast = autocast or autocast_state(hidden.device.type)
        self.dtype = self.autocast.get("dtype", hidden.dtype)
        self.requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in self.inputs)
        self.trained = tuple(t is not None and t.requires_grad for t in (weight, bias))
        self.recipe = _recipe(layer)
        self.shard = self._shard()
        self.versions, self.addresses = self._versions(), self._addresses()
        self.is_read = self.is_fused = self.is_written = self.is_lost = self.is_observed = False
        self.reader = ""
        self.begins: list[Any] = []
        self.logits: weakref.WeakSet[Any] = weakref.WeakSet()
        await_step(self)

    @property
    def inputs(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def parameters(self, with_gradient: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, detached if they required no gradient at the call."""
        weight, bias = (
            t.detach()
            if t is not None and t.requires_grad and not (with_gradient and trained)
            else t
            for t, trained in zip((self.weight, self.bias), self.trained, strict=True)
        )
        assert weight is not None
        return weight, bias

    def own_parameter(self, written: Tensor | None = None) -> None:
        """Copy weight and bias in the dtype of the product, before something writes them.

        If a loop keeps the model's output until the next forward, this costs one copy of the
        weight, at a time when no activations are in memory.

        Args:
            written: parameter that is written, or None for a step, which writes trained weights.
        """
        if self.is_read or self.is_written or not self.logits or not self.is_unchanged():
            return
        if not (self.weight.requires_grad if written is None else self.parameter is written):
            return
        if self.is_freed:
            self.is_lost = True
            return
        dtype = self.dtype if self.precision == "bf16" else stored(self.weight).dtype
        with torch.no_grad():
            self.weight = self.parameter = stored(self.weight).detach().to(dtype, copy=True)
            self.bias = None if self.bias is None else self.bias.detach().to(self.dtype, copy=True)
        self.versions, self.is_written = self._versions(), True
        self.addresses = self._addresses()

    def is_unchanged(self) -> bool:
        addresses = zip(self._addresses(), self.addresses, strict=True)
        moved = any(None not in pair and pair[0] != pair[1] for pair in addresses)
        lost = self.is_lost or (self.is_freed and self._shard() != self.shard)
        unchanged = self._versions() == self.versions and _recipe(self.layer) == self.recipe
        return unchanged and not (moved or lost)

    def _addresses(self) -> list[int | None]:
        return list(map(_address, self.inputs))

    def _versions(self) -> list[Any]:
        return list(map(_version, (*self.inputs, self.parameter)))

    def _shard(self) -> tuple[int, ...] | None:
        """Return numbers that change with each write to the shards of a weight that FSDP2 gathers.

        A write to a DTensor changes its version, a write to its local tensor that tensor's.
        """
        sharded = self.owner.sharded(self.weight)
        if sharded is None:
            return None
        return id(local(sharded)), sharded._version, _version(local(sharded))

    @property
    def is_freed(self) -> bool:
        """Whether FSDP2 has freed the weight."""
        return not memory_of(self.weight).untyped_storage().nbytes()

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Gather a weight that FSDP2 has freed, and free it again at the end.

        Raises:
            RuntimeError: an input was written since the call, or no module gathers the weight.
        """
        if not self.is_unchanged():
            raise RuntimeError(
                f"the weight or the input of '{self.name}' was written after its forward, or its "
                "precision changed, but its "
                "logits, which are computed at their first use, are used only now; read them "
                "before the write, or train with FP8Config(loss_head='off')"
            )
        gathered = self.owner.gather(self.weight) if self.is_freed else None
        if self.is_freed:
            raise RuntimeError(
                f"FSDP2 has freed the weight of '{self.name}', from which the logits are computed "
                "at their first use; call the loss within the model's forward, or train with "
                "FP8Config(loss_head='off')"
            )
        try:
            yield
        finally:
            if gathered is not None:
                gathered.reshard()

    def multiply(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the plain logits of the unconverted layer."""
        with torch.autocast(**self.autocast):
            return self.linear(hidden, weight, bias)

    def dense(self) -> Tensor:
        grad_mode = self.requires_grad and not self.is_written
        with self.present(), torch.set_grad_enabled(grad_mode):
            if not self.is_fused:
                sizes = self.hidden.numel() // self.hidden.shape[-1], self.weight.shape[0]
                self.note(math.prod(sizes) * self.dtype.itemsize, self.reader)
            self.is_read = True
            logits = self.multiply(self.hidden, *self.parameters())
        for hook in self.begins if logits.requires_grad else ():
            logits.register_hook(hook)
        if self.requires_grad and self.is_written:
            logits = _Written.apply(logits, self.hidden, self.name)
        return logits


def autocast_state(device: str) -> dict[str, Any]:
    """Return the arguments of ``torch.autocast`` for its current state; without a dtype if off."""
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return {"device_type": device, "enabled": True, "dtype": dtype}
    return {"device_type": device, "enabled": False}


def memory_of(weight: Tensor) -> Tensor:
    """Return the tensor whose memory holds a weight, the bytes of one in FP8."""
    return getattr(weight, "qdata", weight)


def _version(x: Tensor) -> int:
    """Return a number that changes with each write to a tensor."""
    if isinstance(x, SplitWeight):
        return x.halves.version
    return x.payload.version if isinstance(x, Float8FrozenWeight) else x._version


def _address(x: Tensor) -> int | None:
    """Return the address of a plain tensor, which ``x.data = y`` changes but no version shows.

    It is None if FSDP2 has freed a weight, or if it is stored in another form.
    """
    memory = memory_of(x)
    known = type(memory) in _PLAIN and memory.untyped_storage().nbytes()
    return memory.data_ptr() if known else None


def _recipe(layer: Any) -> Any:
    """Return the FP8 recipe with which a layer runs now, or None in high precision."""
    return layer.fp8.recipe if hasattr(layer, "fp8") else None


class _Written(torch.autograd.Function):
    """Pass on logits of a weight that was written; backward raises, as torch's would."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, hidden: Tensor, name: str) -> Tensor:
        ctx.name = name
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            f"the weight of '{ctx.name}' was written between the forward and this backward of its "
            "logits; write it after backward"
        )
