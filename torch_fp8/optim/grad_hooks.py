"""The hook that runs when autograd has accumulated a parameter's gradient.

At level O3 it quantizes the gradient of an FP8 layer's weight to a `Float8Grad` before autograd
computes the next one. Later micro-batches are added in place by `Float8Grad.add_`.

With gradient release it steps the parameter and frees the gradient. At that point this backward has
no more use for the parameter, so stepping it there gives the same bits as a step after backward,
and the gradient is gone before the next one exists. Only bookkeeping is left for
``optimizer.step()``. Gradient release needs a loop with one backward per step in which nothing
reads all gradients at once. Between backward and ``step()``, ``p.grad`` is a
`torch_fp8.tensor.released_grad.ReleasedGrad`, so clipping, a norm of all gradients, GradScaler and
a second backward raise an error, where a gradient of None would give a norm of 0.

Hooks can get lost: ``fully_shard`` and ``load_state_dict(assign=True)`` replace Parameters, and
deepcopy and pickling drop hooks. So an optimizer remembers the FP8 layers whose weights need one
and adds missing hooks in each step. A lost hook costs memory, not correctness. You may add, remove,
split and reorder groups in between.
"""

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.ops.grad_codec import Rounding
from torch_fp8.ops.hardware import refuse_capture
from torch_fp8.optim.step import shard_origin
from torch_fp8.tensor.dtensor import local, with_data
from torch_fp8.tensor.exchange import stored_grad
from torch_fp8.tensor.float8_grad import Float8Grad
from torch_fp8.tensor.producer import own_parameters
from torch_fp8.tensor.released_grad import is_released, release, second_gradient
from torch_fp8.tensor.split_shard import SplitShard
from torch_fp8.tensor.wide_grad import WideGrad


def release_gradient(optimizer: Any, index: int, group: dict[str, Any], parameter: Tensor) -> None:
    """Step one parameter and free its gradient.

    Args:
        optimizer: the converted optimizer, with gradient release.
        index: the parameter's index among all parameters of the optimizer.
        group: the parameter's group.
        parameter: the parameter, with its gradient.
    Raises:
        RuntimeError: the parameter was already stepped since the last ``optimizer.step()``.
    """
    if parameter in optimizer.fp8_released:
        raise second_gradient(parameter.shape)
    own_parameters()
    optimizer.step_parameters([(index, group, parameter)])
    release(parameter)
    optimizer.fp8_released.add(parameter)


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


class GradientExchange(Protocol):
    """Averages gradients over ranks during backward, for the hooks of their parameters.

    Attributes:
        rank: this process's rank.
    """

    rank: int

    def prepare(self, output: Any, synchronize: bool) -> None:
        """Prepare for the backward of `output`; `synchronize`: whether it averages."""

    def begun(self) -> bool:
        """Return whether the running backward averages gradients."""

    def ready(self, parameter: Tensor) -> None:
        """Take ``parameter.grad``, which is complete on this rank."""


class GradientHook:
    """A hook that quantizes, detaches or releases a parameter's gradient for one optimizer.

    Args:
        optimizer: the converted optimizer.
        index: the parameter's index among all of the optimizer as of its last step; it keys the
            random bits.
    """

    quantize = False
    release = False

    def __init__(self, optimizer: Any, index: int) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.index = index

    @torch.compiler.disable  # a compiled function that calls loss.backward() would trace it
    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or stored_grad(parameter) is None:
            return
        exchange = self._exchange(parameter)
        if exchange is not None and exchange.begun():
            exchange.ready(parameter)
        elif self.quantize:
            self.to_float8(parameter)
        elif isinstance(parameter, DTensor) and not self.release:
            _take_out(parameter)
        if self.release:
            refuse_capture(
                "gradient release", "use FP8Config(gradient_release=False) in CUDA graphs"
            )
            group = _group_of(optimizer, parameter)
            if group is not None:
                release_gradient(optimizer, self.index, group, parameter)

    def to_float8(self, parameter: Tensor, *, exchanged: bool = False) -> None:
        """Quantize ``parameter.grad``.

        Args:
            parameter: the parameter, with its gradient.
            exchanged: whether the gradient is an average over ranks, which all ranks must round
                alike.
        """
        grad = stored_grad(parameter)
        assert grad is not None
        shard = local(grad)
        if isinstance(shard, Float8Grad) or _is_partial(grad):
            return
        if not exchanged and type(grad) is Tensor and _is_part(grad):
            return  # a view of the user's flat buffer, which has to see the gradient
        rounding, dtype = self.rounding(parameter), local(parameter).dtype
        quantized = Float8Grad.quantize(shard, rounding, dtype, exchanged=exchanged)
        parameter.grad = with_data(grad, quantized)

    def rounding(self, parameter: Tensor) -> Rounding:
        """Return the random bits for the rounding of a new gradient."""
        row, col, row_length = shard_origin(parameter)
        exchange = self._exchange(parameter)
        rank = 0 if exchange is None else exchange.rank
        return Rounding(self._counters, row * row_length + col, rank)

    def _exchange(self, parameter: Tensor) -> GradientExchange | None:
        optimizer: Any = self._optimizer()
        return None if optimizer is None else optimizer.fp8_exchanges.get(parameter)

    def _counters(self) -> tuple[int, ...]:
        """Return seed, step and parameter index, which are the same in a resumed run."""
        optimizer: Any = self._optimizer()
        if optimizer is None:
            return (self.index,)
        every = (p for group in optimizer.param_groups for p in group["params"])
        parameter = next(itertools.islice(every, self.index, None), None)
        step = 0 if parameter is None else optimizer.step_of(parameter)
        return optimizer.fp8_config.seed, step, self.index

    def belongs_to(self, optimizer: Optimizer) -> bool:
        """Return whether this hook belongs to `optimizer`."""
        return self._optimizer() is optimizer


def attach_hooks(optimizer: Any) -> int:
    """Give every parameter of a converted optimizer the hook it should have, and no other.

    Returns:
        The number of hooks that quantize or release and were missing.
    """
    weights, missing = optimizer.fp8_gradients, 0
    release = optimizer.fp8_config.gradient_release
    indexed, exchanges = optimizer.indexed_parameters(), optimizer.fp8_exchanges
    sharded = [p._local_tensor for _, _, p in indexed if isinstance(p, DTensor)]
    narrow = bool(weights) or any(isinstance(shard, SplitShard) for shard in sharded)
    for index, _, parameter in indexed:
        quantize = bool(weights) and parameter in weights
        take_out = narrow and isinstance(parameter, DTensor)
        averaged = bool(exchanges) and parameter in exchanges
        hook = hook_of(parameter)
        if hook is not None and not hook.belongs_to(optimizer):
            remove_hook(parameter)
            hook = None
        if not (quantize or release or take_out or averaged):
            if hook is not None:
                remove_hook(parameter)
        elif hook is None and (quantize or parameter.requires_grad):
            hook = GradientHook(optimizer, index)
            _register(parameter, hook)
            missing += quantize or release
        if hook is not None:
            hook.index, hook.quantize, hook.release = index, quantize, release
    return missing


def _register(parameter: Tensor, hook: GradientHook) -> None:
    """Register a hook, also for a frozen weight, which may be trained later."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trained)


def detach_hooks(optimizer: Optimizer) -> None:
    """Remove all hooks that `attach_hooks` added for this optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            hook = hook_of(parameter)
            if hook is not None and hook.belongs_to(optimizer):
                remove_hook(parameter)
                if is_released(parameter):
                    parameter.grad = None


def hook_of(parameter: Tensor) -> GradientHook | None:
    """Return the hook of a parameter, if it has one."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if not hooks:
        return None
    return next((h for h in hooks.values() if isinstance(h, GradientHook)), None)


def keeps_8_bits(parameter: Tensor) -> bool:
    """Return whether a gradient that arrived from other ranks in 8 bits stays quantized."""
    hook = hook_of(parameter)
    return hook is None or hook.quantize


def remove_hook(parameter: Tensor) -> None:
    """Remove the gradient hook of a parameter, for any optimizer."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, GradientHook)]:
        del hooks[key]


def _group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any] | None:
    """Return the group that has the parameter now; None if it was taken out."""
    groups = optimizer.param_groups
    return next((g for g in groups if any(p is parameter for p in g["params"])), None)


def _take_out(parameter: Tensor) -> None:
    """Copy a gradient that FSDP2 has reduced to its own memory, for a split weight in BF16.

    The gradient is a view of the float32 buffer of a whole block, which it would keep alive.
    """
    grad = parameter.grad
    assert grad is not None
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
