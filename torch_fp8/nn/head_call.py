"""`HeadCall`: one forward of an output layer, whose logits are computed when they are read.

It keeps the layer's input and weight with the grad mode and the autocast state of the call, and
notices writes to them.

Legend: H hidden features, V classes.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


class HeadCall:
    """One forward of an output layer.

    Args:
        name: qualified name of the layer, for errors.
        hidden: input (..., H).
        weight: (V, H).
        bias: (V,) or None.
        gather: function that gathers a weight which FSDP2 has freed; it returns False if the weight
            is not FSDP2's.
        note: function that gets whether a loss was fused, or something else read the logits.

    Attributes:
        dtype: dtype of the logits.
        is_read: whether plain logits exist, so that everything else uses them.
        is_fused: whether a loss was computed without logits.
        begins: hooks of FSDP2 and Fabric that run when the backward of the logits begins.
        logits: all logits that were recorded and still exist.
    """

    def __init__(
        self,
        name: str,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gather: Callable[[Tensor], bool],
        note: Callable[[bool], None],
    ) -> None:
        self.name, self.hidden, self.weight, self.bias = name, hidden, weight, bias
        self.gather, self.note = gather, note
        device = hidden.device.type
        self.autocast: dict[str, Any] = {"device_type": device, "enabled": False}
        self.dtype = hidden.dtype
        if torch.is_autocast_enabled(device):
            self.dtype = torch.get_autocast_dtype(device)
            self.autocast.update(enabled=True, dtype=self.dtype)
        self.requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in self.inputs)
        self.versions = [t._version for t in self.inputs]
        self.address = _address(weight)
        self.is_read = self.is_fused = self.is_written = False
        self.begins: list[Any] = []
        self.logits: weakref.WeakSet[Any] = weakref.WeakSet()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(own_weights))
        _unread.add(self)

    @property
    def inputs(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def own_weight(self) -> None:
        """Copy weight and bias in the dtype of the product, before something writes them."""
        if self.is_read or self.is_written or not self.logits or not self.is_unchanged():
            return
        if not self.weight.untyped_storage().nbytes():
            return
        with torch.no_grad():
            self.weight = self.weight.detach().to(self.dtype, copy=True)
            self.bias = None if self.bias is None else self.bias.detach().to(self.dtype, copy=True)
        self.versions, self.is_written = [t._version for t in self.inputs], True
        self.address = _address(self.weight)

    def is_unchanged(self) -> bool:
        address = _address(self.weight)
        moved = self.address is not None and address is not None and address != self.address
        return not moved and [t._version for t in self.inputs] == self.versions

    def check(self) -> None:
        """Gather a weight that FSDP2 has freed; raise RuntimeError if an input was written."""
        if not self.is_unchanged():
            raise RuntimeError(
                f"the weight or the input of '{self.name}' was written after its forward, but its "
                "logits, which are computed at their first use, are used only now; read them "
                "before the write, or train with FP8Config(loss_head='off')"
            )
        if not self.weight.untyped_storage().nbytes() and not self.gather(self.weight):
            raise RuntimeError(
                f"FSDP2 has freed the weight of '{self.name}', from which the logits are computed "
                "at their first use; call the loss within the model's forward, or train with "
                "FP8Config(loss_head='off')"
            )

    def multiply(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the plain logits of the unconverted layer."""
        with torch.autocast(**self.autocast):
            return F.linear(hidden, weight, bias)

    def dense(self) -> Tensor:
        self.check()
        if not self.is_fused:
            self.note(False)
        self.is_read = True
        with torch.set_grad_enabled(self.requires_grad and not self.is_written):
            logits = self.multiply(self.hidden, self.weight, self.bias)
        for hook in self.begins if logits.requires_grad else ():
            logits.register_hook(hook)
        if self.requires_grad and self.is_written:
            logits = _Written.apply(logits, self.hidden, self.name)
        return logits


def _address(weight: Tensor) -> int | None:
    """Return the address of a weight, which ``weight.data = x`` changes but no version shows.

    None: FSDP2 has freed it, or it has none.
    """
    if isinstance(weight, FakeTensor) or not weight.untyped_storage().nbytes():
        return None
    return weight.data_ptr()


_unread: "weakref.WeakSet[HeadCall]" = weakref.WeakSet()
_hooks: list[Any] = []


def own_weights(*_: Any) -> None:
    """Have logits that are not computed yet copy their weights, before a step writes these.

    In loops that keep the model's output until the next forward, that is one copy of the weight,
    held while no activations are.
    """
    for call in list(_unread):
        call.own_weight()


class _Written(torch.autograd.Function):
    """Map logits of a copied weight to the same, without a gradient, as torch's own have none."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, hidden: Tensor, name: str) -> Tensor:
        ctx.name = name
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            f"the weight of '{ctx.name}' was written between the forward and this backward of its "
            "logits"
        )
