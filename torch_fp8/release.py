"""Gradient release: the optimizer runs in backward, and each gradient is freed at once.

As soon as autograd has accumulated a parameter's gradient, all uses of the parameter in this
backward are behind it: the parameter is stepped there and then, and its gradient is gone before the
next is made. The loop's ``optimizer.step()`` has only the bookkeeping left, and the run is the same
bit for bit.

That takes a loop with one backward per step, where nobody needs all gradients at once. What the
engine can see of other loops it refuses: a second gradient before ``step()``, and GradScaler.
Clipping by norm it cannot see (it finds no gradients); the hosts refuse that.
"""

from typing import Any

import torch
from torch import Tensor


def release_gradient(optimizer: Any, index: int, group: dict[str, Any], parameter: Tensor) -> None:
    """Step one parameter and free its gradient.

    Args:
        optimizer: converted, with gradient release.
        index: the parameter's place among all of it.
        group: that it belongs to.
        parameter: that has its gradient.
    Raises:
        RuntimeError: it was stepped since the last ``optimizer.step()`` already.
    """
    if index in optimizer.fp8_released:
        raise RuntimeError(
            f"parameter {index}, of shape {tuple(parameter.shape)}, got a second gradient before "
            "optimizer.step(), but FP8Config(gradient_release=True) has applied and freed the "
            "first one in backward. Gradient accumulation over micro-batches, and checkpointing "
            "with use_reentrant=True of a weight that is used in several places, need "
            "gradient_release=False"
        )
    optimizer.step_parameters([(index, group, parameter)])
    # A sharded parameter has a version beside its shard's: a graph that still needs the old value
    # shall say so.
    torch.autograd.graph.increment_version(parameter)
    parameter.grad = None
    optimizer.fp8_released.add(index)


def finish_release(optimizer: Any) -> None:
    """What is left of ``optimizer.step()``.

    Raises:
        RuntimeError: GradScaler runs the step: the gradients had its scale.
    """
    optimizer.fp8_released.clear()
    # What GradScaler tells an optimizer that unscales by itself.
    if optimizer.fp8_config.gradient_release and hasattr(optimizer, "found_inf"):
        raise RuntimeError(
            "GradScaler cannot unscale gradients that FP8Config(gradient_release=True) has applied "
            "in backward; BF16 needs no GradScaler, or set gradient_release=False"
        )
