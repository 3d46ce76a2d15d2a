"""StableAdamW of the package optimi, which is AdamW with update clipping (arXiv 2304.13013).

It is what transformers runs for ``optim="stable_adamw"``. Its moments without their biases, the
clipping by the RMS of ``g / sqrt(v)`` and the decoupled decay are what `torch_fp8.ops.adamw`
computes with ``FP8Config(update_clipping=True)``.
"""

from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.optim.converted import ConvertedOptimizer

_OF_ADAMW = {
    "maximize": False,
    "amsgrad": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_OF_OPTIMI = (
    "decouple_lr",
    "max_lr",
    "kahan_sum",
    "foreach",
    "triton",
    "gradient_release",
    "setup",
)


class StableAdamW(torch.optim.AdamW):
    """AdamW whose updates are clipped once it is converted, and not before."""


def adopt_stable_adamw(optimizer: Optimizer, config: FP8Config) -> FP8Config:
    """Make a StableAdamW of optimi an AdamW, in place, and return its configuration.

    One that has stepped, or with ``decouple_lr`` or ``gradient_release``, stays as it is, as does
    one of sharded weights, whose RMS no rank knows.
    """
    cls = type(optimizer)
    if (cls.__name__, cls.__module__.partition(".")[0]) == ("StableAdamW", "optimi"):
        groups = optimizer.param_groups
        others = any(group["decouple_lr"] or group["gradient_release"] for group in groups)
        sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
        if others or sharded or any(optimizer.state.values()):
            return config
        _become_adamw(optimizer)
    base = optimizer._fp8_base if isinstance(optimizer, ConvertedOptimizer) else type(optimizer)
    return replace(config, update_clipping=True) if issubclass(base, StableAdamW) else config


def _become_adamw(optimizer: Optimizer) -> None:
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group["betas"] = (group.pop("beta1"), group.pop("beta2"))
        for name in _OF_OPTIMI:
            group.pop(name, None)
        group.update(_OF_ADAMW)
    hooks = optimizer._optimizer_load_state_dict_post_hooks
    for key in [k for k, hook in hooks.items() if hook.__module__.startswith("optimi.")]:
        del hooks[key]  # for states that there are none of
    optimizer.__class__ = StableAdamW
