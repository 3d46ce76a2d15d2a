"""Gradient release: the optimizer runs in backward, and each gradient is freed at once.

As soon as autograd has accumulated a parameter's gradient, all uses of the parameter in this
backward are behind it: the parameter is stepped there and then, and its gradient is gone before the
next is made. The loop's ``optimizer.step()`` has only the bookkeeping left, and the run is the same
bit for bit.

That takes a loop with one backward per step, where nobody needs all gradients at once. Between
backward and ``step()`` ``p.grad`` is a `ReleasedGrad`, which has no memory: whoever reads it, to
clip by norm, to measure or to check, would find nothing were it None, and is told instead. So is a
second backward before ``step()``, and GradScaler.
"""

from typing import Any

import torch
from torch import Tensor

from torch_fp8.optimizer_state import local, with_data

_WHY = "FP8Config(gradient_release=True) has applied and freed"


class ReleasedGrad(Tensor):
    """What is left of a gradient: its shape, dtype and device. Zeroing it does nothing.

    Raises:
        RuntimeError: anything else is done with it; the way out is named.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, like: Tensor, dtype: torch.dtype | None = None, device: Any = None
    ) -> "ReleasedGrad":
        self: ReleasedGrad = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype or like.dtype, device=device or like.device
        )
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        first = args[0]
        if name in _COPIES and isinstance(first, ReleasedGrad):
            return ReleasedGrad(first, kwargs.get("dtype"), kwargs.get("device"))
        if name == "zero_":
            return first
        if name in _OF_LISTS:
            plain = [grad for grad in first if not isinstance(grad, ReleasedGrad)]
            return func(plain, *args[1:], **kwargs) if plain else None
        shape = next(t for t in _flat((args, kwargs)) if isinstance(t, ReleasedGrad)).shape
        if name in ("add", "add_"):
            raise RuntimeError(_second_gradient(f"a parameter of shape {tuple(shape)}"))
        raise RuntimeError(
            f"{_WHY} the gradient of a parameter of shape {tuple(shape)} in backward: it has no "
            f"values ('{name}' asks for them). Take clip_grad_norm_, clip_grad_value_ and whatever "
            "else reads p.grad before optimizer.step() out of the loop, or set "
            "gradient_release=False"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReleasedGrad":
        return ReleasedGrad(self)

    def __repr__(self) -> str:
        return f"ReleasedGrad(shape={tuple(self.shape)}, dtype={self.dtype})"


_COPIES = ("detach", "alias", "view", "clone", "_to_copy")
_OF_LISTS = ("_foreach_zero_", "_amp_foreach_non_finite_check_and_unscale_")


def is_released(grad: Tensor | None) -> bool:
    """Whether a gradient, perhaps a DTensor, was applied and freed."""
    return grad is not None and isinstance(local(grad), ReleasedGrad)


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
        name = f"parameter {index}, of shape {tuple(parameter.shape)},"
        raise RuntimeError(_second_gradient(name))
    optimizer.step_parameters([(index, group, parameter)])
    # A sharded parameter has a version beside its shard's: a graph that still needs the old value
    # shall say so.
    torch.autograd.graph.increment_version(parameter)
    grad = parameter.grad
    assert grad is not None
    parameter.grad = with_data(grad, ReleasedGrad(local(grad)))
    optimizer.fp8_released.add(index)


def finish_release(optimizer: Any) -> None:
    """What is left of ``optimizer.step()``.

    Raises:
        RuntimeError: GradScaler runs the step: the gradients had its scale.
    """
    optimizer.fp8_released.clear()
    if not optimizer.fp8_config.gradient_release:
        return
    for _, _, parameter in optimizer.indexed_parameters():
        if is_released(parameter.grad):
            parameter.grad = None
    # What GradScaler tells an optimizer that unscales by itself.
    if hasattr(optimizer, "found_inf"):
        raise RuntimeError(
            "GradScaler cannot unscale gradients that FP8Config(gradient_release=True) has applied "
            "in backward; BF16 needs no GradScaler, or set gradient_release=False"
        )


def _second_gradient(parameter: str) -> str:
    return (
        f"{parameter} got a second gradient before optimizer.step(), but {_WHY} the first one in "
        "backward. Gradient accumulation over micro-batches, and checkpointing with "
        "use_reentrant=True of a weight that is used in several places, need gradient_release=False"
    )


def _flat(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)
