"""Conversion of optimi's StableAdamW, which is AdamW with update clipping (arXiv 2304.13013).

transformers uses it for ``optim="stable_adamw"``. Bias-corrected moments, clipping by the RMS of
``g / sqrt(v)`` and decoupled decay are what `torch_fp8.ops.adamw` computes with
``FP8Config(update_clipping=True)``.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.optim.converted import ConvertedOptimizer

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
    """An AdamW that clips its updates after `convert_optimizer`, but not before."""


def adopt_stable_adamw(optimizer: Optimizer, config: FP8Config) -> FP8Config:
    """Turn optimi's StableAdamW into an AdamW in place, and return the configuration for it.

    It stays as it is if it has already stepped, if it uses ``decouple_lr`` or ``gradient_release``,
    or if its weights are sharded, because no rank can compute the RMS of a whole sharded weight.
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
    of_adamw = torch.optim.AdamW([torch.zeros(1, dtype=torch.float32, device="cpu")]).defaults
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group["betas"] = (group.pop("beta1"), group.pop("beta2"))
        for name in _OF_OPTIMI:
            group.pop(name, None)
        group.update({name: value for name, value in of_adamw.items() if name not in group})
    handle = optimizer.register_load_state_dict_post_hook(lambda _: None)
    hooks: Any = handle.hooks_dict_ref()
    handle.remove()
    for key in [k for k, hook in hooks.items() if hook.__module__.startswith("optimi.")]:
        del hooks[key]  # they load states that AdamW does not have
    optimizer.__class__ = StableAdamW
