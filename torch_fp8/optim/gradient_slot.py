"""`GradientSlot`: the owner of a gradient from the time when autograd has accumulated it.

The slot is a hook of its parameter. Under DistributedDataParallel it hands the gradient to an
exchange, which averages it over ranks. At level O3 it quantizes the gradient of an FP8 layer's
weight to a `Float8Grad` before autograd computes the next one. Later micro-batches are added in
place by `Float8Grad.add_`.

With gradient release it steps the parameter and frees the gradient. At that point this backward has
no more use for the parameter, so stepping it there gives the same bits as a step after backward,
and the gradient is gone before the next one exists. Only bookkeeping is left for
``optimizer.step()``. Gradient release needs a loop with one backward per step in which nothing
reads all gradients at once. Between backward and ``step()``, ``p.grad`` is a
`torch_fp8.tensor.released_grad.ReleasedGrad`, so clipping, a norm of all gradients, GradScaler and
a second backward raise an error, where a gradient of None would give a norm of 0.

Slots can get lost: ``fully_shard`` and ``load_state_dict(assign=True)`` replace Parameters, and
deepcopy and pickling drop hooks. So an optimizer remembers the FP8 layers whose weights need one
and adds missing slots in each step. A lost slot costs memory, not correctness. You may add, remove,
split and reorder groups in between.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.autograd.current_pass import before_traces
from torch_fp8.ops.grad_codec import Rounding
from torch_fp8.ops.hardware import refuse_capture
from torch_fp8.optim.state import shard_origin
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.exchange import stored_grad
from torch_fp8.tensor.float8_grad import Float8Grad
from torch_fp8.tensor.producer import own_parameters
from torch_fp8.tensor.released_grad import is_released, release, second_gradient
from torch_fp8.tensor.split_shard import SplitShard
from torch_fp8.tensor.wide_grad import WideGrad


def finish_release(optimizer: Any) -> None:
    """Do what remains of ``optimizer.step()`` after a backward that stepped the parameters.

    Raises:
        RuntimeError: GradScaler runs the step, so the applied gradients were scaled.
    """
    optimizer.fp8_released.clear()
    if not optimizer.fp8_config.gradient_release:
        return
    for _, _, parameter in optimizer.indexed_parameters():
        if is_released(parameter):
            parameter.grad = None
    # GradScaler sets found_inf on optimizers that unscale gradients themselves.
    if hasattr(optimizer, "found_inf"):
        raise RuntimeError(
            "GradScaler cannot unscale gradients that FP8Config(gradient_release=True) has applied "
            "in backward; BF16 needs no GradScaler, or set gradient_release=False"
        )


class GradientSlot:
    """The owner of a parameter's gradient: it quantizes, releases or hands it to an exchange.

    Attributes:
        index: the parameter's index among all of its optimizer as of the last step; it keys the
            random bits.
        quantize: whether the gradient becomes a `Float8Grad`.
        release: whether the optimizer steps in backward.
        exchange: the reducer (`torch_fp8.distributed.ddp.fp8_grad_reducer`) that averages the
            gradient over ranks, or None.
    """

    index = 0
    quantize = False
    release = False
    exchange: Any = None
    _optimizer: Callable[[], Any] = staticmethod(lambda: None)

    @torch.compiler.disable  # a compiled function that calls loss.backward() would trace it
    def __call__(self, parameter: Tensor) -> None:
        """Take the gradient that autograd has accumulated."""
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                return self(parameter)
        optimizer = self._optimizer()
        if optimizer is None or stored_grad(parameter) is None:
            return None
        if self.exchange is None or not self.exchange.ready(parameter):
            if self.quantize:
                self.to_float8(parameter)
            elif isinstance(parameter, DTensor) and not self.release:
                _take_out(parameter)
        if self.release:
            refuse_capture(
                "gradient release", "use FP8Config(gradient_release=False) in CUDA graphs"
            )
            self._release(optimizer, parameter)
        return None

    def _release(self, optimizer: Any, parameter: Tensor) -> None:
        """Step the parameter and free its gradient, unless it was taken out of the optimizer."""
        groups = optimizer.param_groups
        group = next((g for g in groups if any(p is parameter for p in g["params"])), None)
        if group is None:
            return
        if parameter in optimizer.fp8_released:
            raise second_gradient(parameter.shape)
        own_parameters()
        optimizer.step_parameters([(self.index, group, parameter)])
        release(parameter)
        optimizer.fp8_released.add(parameter)

    def to_float8(self, parameter: Tensor, *, exchanged: bool = False) -> None:
        """Quantize ``parameter.grad``.

        Args:
            parameter: the parameter, with its gradient.
            exchanged: whether the gradient is an average over ranks, which all ranks must round
                alike.
        """
        grad: Any = stored_grad(parameter)
        is_plain = type(grad) is Tensor
        shard, like = (grad, parameter) if is_plain else (local(grad), local(parameter))
        if not is_plain and (isinstance(shard, Float8Grad) or _is_partial(grad)):
            return
        if is_plain and not exchanged and grad._version and _is_part(grad):
            return  # added in place to a view of the user's flat buffer, which has to see it
        rounding = self.rounding(parameter)
        quantized = Float8Grad.quantize(shard, rounding, like.dtype, exchanged=exchanged)
        parameter.grad = quantized if is_plain else with_data(grad, quantized)

    def rounding(self, parameter: Tensor) -> Rounding:
        """Return the random bits for the rounding of a new gradient."""
        is_sharded = isinstance(parameter, DTensor)
        row, col, row_length = shard_origin(parameter) if is_sharded else (0, 0, 0)
        rank = 0 if self.exchange is None else self.exchange.rank
        return Rounding(self._counters, row * row_length + col, rank)

    def _counters(self) -> tuple[int, ...]:
        """Return seed, step and parameter index, which are the same in a resumed run.

        They come from the optimizer, without a weak reference to the parameter, because torch
        swaps no tensor that has one.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return (self.index,)
        return optimizer.fp8_config.seed, optimizer.step_of(self.index), self.index

    def belongs_to(self, optimizer: Optimizer) -> bool:
        """Return whether this slot serves `optimizer`."""
        return self._optimizer() is optimizer


def attach_slots(optimizer: Any) -> int:
    """Give every parameter of a converted optimizer the slot it should have, and no other.

    Returns:
        The number of slots that quantize or release and were missing.
    """
    weights, missing = optimizer.fp8_gradients, 0
    if weights:
        _with_8_bits.add(optimizer)
    release = optimizer.fp8_config.gradient_release
    indexed = optimizer.indexed_parameters()
    kinds = {type(parameter) for _, _, parameter in indexed}
    shards = [local(p) for *_, p in indexed] if any(issubclass(k, DTensor) for k in kinds) else []
    narrow = bool(weights) or any(isinstance(shard, SplitShard) for shard in shards)
    for index, _, parameter in indexed:
        slot = slot_of(parameter) if parameter._post_accumulate_grad_hooks else None
        quantize = bool(weights) and parameter in weights
        averaged = slot is not None and slot.exchange is not None
        if not (quantize or release or averaged or (narrow and isinstance(parameter, DTensor))):
            if slot is not None:
                remove_slot(parameter)
            continue
        if slot is None and not (quantize or parameter.requires_grad):
            continue
        is_new = slot is None or not slot.belongs_to(optimizer)
        missing += is_new and (quantize or release)
        slot = give_slot(optimizer, index, parameter)
        slot.quantize, slot.release = quantize, release
    return missing


_with_8_bits: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The optimizers with gradients in 8 bits."""


def _decode_plain() -> None:
    """Decode the 8-bit gradients of plain parameters: Dynamo traces no such parameter with one.

    A slot quantizes the sum with the next gradient again.
    """
    for parameter in itertools.chain.from_iterable([o.fp8_gradients for o in _with_8_bits]):
        grad, weight = stored_grad(parameter), local(parameter)
        shard = None if grad is None else local(grad)
        if type(weight) in (Tensor, nn.Parameter) and isinstance(shard, Float8Grad):
            parameter.grad = with_data(grad, shard.dequantize())


before_traces.append(_decode_plain)


def give_slot(optimizer: Any, index: int, parameter: Tensor) -> GradientSlot:
    """Return the parameter's slot, which serves this optimizer from now on."""
    slot = slot_of(parameter)
    if slot is None:
        slot = GradientSlot()
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # also a frozen weight, which may be trained later
        parameter.register_post_accumulate_grad_hook(slot)
        parameter.requires_grad_(trained)
    if not slot.belongs_to(optimizer):
        slot._optimizer = weakref.ref(optimizer)
    slot.index = index
    return slot


def detach_slots(optimizer: Optimizer) -> None:
    """Remove all slots that serve this optimizer."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        slot = slot_of(parameter)
        if slot is not None and slot.belongs_to(optimizer):
            remove_slot(parameter)
            if is_released(parameter):
                parameter.grad = None


def slot_of(parameter: Tensor) -> GradientSlot | None:
    """Return the slot of a parameter, if it has one."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return next((h for h in hooks.values() if isinstance(h, GradientSlot)), None)


def remove_slot(parameter: Tensor) -> None:
    """Remove the slot of a parameter, for any optimizer."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, GradientSlot)]:
        hooks.pop(key).quantize = False


def _take_out(parameter: Tensor) -> None:
    """Copy a gradient that FSDP2 has reduced to its own memory, for a split weight in BF16.

    The gradient is a view of the float32 buffer of a whole block, which it would keep alive.
    """
    grad: Any = parameter.grad
    shard = local(grad)
    if type(shard) is not Tensor:
        return
    if isinstance(local(parameter), SplitShard) and not _is_partial(grad):
        parameter.grad = with_data(grad, WideGrad(shard.to(torch.bfloat16)))
    elif _is_part(shard):
        parameter.grad = with_data(grad, shard.clone())


def _is_part(grad: Tensor) -> bool:
    """Return whether a plain gradient is a view of a larger storage."""
    return grad.untyped_storage().nbytes() > grad.nbytes


def _is_partial(grad: Tensor) -> bool:
    """Return whether a gradient holds partial sums that are still to be reduced."""
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)
