"""Hooks on an optimizer, torch's own, that detect the end of a step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


def hook_step(
    optimizers: Sequence[Optimizer],
    before_update: Callable[[], None],
    after_update: Callable[[], None],
) -> list[Any]:
    """Hook the optimizer with the most elements; its step may get a closure that runs the backward.

    Args:
        optimizers: the optimizers of a model.
        before_update: a function called when all gradients exist.
        after_update: a function called after the weights are updated.
    Returns:
        The handles that remove the hooks.
    """
    sizes = [sum(p.numel() for g in o.param_groups for p in g["params"]) for o in optimizers]
    main = optimizers[sizes.index(max(sizes))]

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            before_update()
            return None

        def measured() -> Any:
            result = closure()
            before_update()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": measured}
        return (args[0], measured, *args[2:]), kwargs

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        after_update()

    return [  # a compiled step breaks its graph to run them
        main.register_step_pre_hook(torch.compiler.disable(before)),
        main.register_step_post_hook(torch.compiler.disable(after)),
    ]
