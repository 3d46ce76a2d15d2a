"""The hook that runs when autograd has accumulated a parameter's gradient.

At level O3 it turns the gradient of an FP8 layer's weight into a `Float8Grad`, before the next one
is made; with gradient release it runs the optimizer on that parameter and frees the gradient. Later
micro-batches are added in place, which `Float8Grad.add_` does.

Hooks get lost: ``fully_shard`` and ``load_state_dict(assign=True)`` replace Parameters, deepcopy
and pickling leave hooks behind. So an optimizer remembers which of its parameters want one, by
their places, and puts missing ones back in every step. A lost hook costs memory, not correctness.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.gradient_parts import Rounding
from torch_fp8.gradients import Float8Grad
from torch_fp8.optimizer_state import local, with_data
from torch_fp8.optimizer_step import shard_origin
from torch_fp8.release import release_gradient


class GradientHook:
    """What a parameter's gradient goes through; one per parameter, owned by its optimizer.

    Args:
        optimizer: converted.
        index: the parameter's place among all of the optimizer.
        place: its group, and its place there.
    """

    quantize = False
    release = False

    def __init__(self, optimizer: Any, index: int, place: tuple[int, int]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.index, self._place = index, place

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or parameter.grad is None:
            return
        exchange = _exchange(optimizer, parameter)
        if self.quantize and exchange is not None and exchange.begun():
            exchange.ready(parameter)
        elif self.quantize:
            self.to_float8(parameter)
        if self.release:
            release_gradient(
                optimizer, self.index, optimizer.param_groups[self._place[0]], parameter
            )

    def to_float8(self, parameter: Tensor, *, exchanged: bool = False) -> None:
        """Quantize ``parameter.grad``.

        Args:
            exchanged: whether it is an average over ranks, which all of them round alike.
        """
        grad = parameter.grad
        assert grad is not None
        shard = local(grad)
        if isinstance(shard, Float8Grad):
            return
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            return  # the addends of a sum that is still to be made
        quantized = Float8Grad.quantize(shard, self.rounding(parameter), exchanged=exchanged)
        parameter.grad = with_data(grad, quantized)

    def rounding(self, parameter: Tensor) -> Rounding:
        """Of a new gradient."""
        row, col, row_length = shard_origin(parameter)
        exchange = _exchange(self._optimizer(), parameter)
        rank = 0 if exchange is None else exchange.rank
        return Rounding(self._counters, row * row_length + col, rank)

    def _counters(self) -> tuple[int, ...]:
        """Seed, step and parameter: what a resumed run has again."""
        optimizer: Any = self._optimizer()
        if optimizer is None:
            return (self.index,)
        group, position = self._place
        parameter = optimizer.param_groups[group]["params"][position]
        step = optimizer.state.get(parameter, {}).get("step", 0)
        return optimizer.fp8_config.seed, int(step), self.index

    def belongs_to(self, optimizer: Optimizer) -> bool:
        """Whether it is one of `optimizer`'s."""
        return self._optimizer() is optimizer


def attach_hooks(optimizer: Any) -> int:
    """Give every parameter of a converted optimizer the hook it should have, and no other.

    Returns:
        The number of hooks that were missing.
    """
    index, missing = 0, 0
    for g, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            quantize = index in optimizer.fp8_gradients
            release = optimizer.fp8_config.gradient_release
            hook = hook_of(parameter)
            if hook is not None and not (hook.belongs_to(optimizer) and hook.index == index):
                remove_hook(parameter)
                hook = None
            if not (quantize or release) or not parameter.requires_grad:
                remove_hook(parameter)
            elif hook is None:
                hook = GradientHook(optimizer, index, (g, position))
                parameter.register_post_accumulate_grad_hook(hook)
                missing += 1
            if hook is not None:
                hook.quantize, hook.release = quantize, release
            index += 1
    return missing


def detach_hooks(optimizer: Optimizer) -> None:
    """Take away every hook of `attach_hooks`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            hook = hook_of(parameter)
            if hook is not None and hook.belongs_to(optimizer):
                remove_hook(parameter)


def hook_of(parameter: Tensor) -> GradientHook | None:
    """The hook of a parameter, if it has one."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return next((h for h in hooks.values() if isinstance(h, GradientHook)), None)


def remove_hook(parameter: Tensor) -> None:
    """Take the hook of a parameter away, whoever owns it."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, GradientHook)]:
        del hooks[key]


def _exchange(optimizer: Any, parameter: Tensor) -> Any:
    exchanges = getattr(optimizer, "fp8_exchanges", ())
    return next((e for e in exchanges if parameter in e.parameters), None)
