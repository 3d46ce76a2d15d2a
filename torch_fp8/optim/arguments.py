"""Optimizers as users pass them: wrapped by a host, or wrong.

States can follow every sharding along rows (column-wise parallel, FSDP2). If a matrix is sharded
along its columns (row-wise parallel), groups of 32 start anew on each rank; the states equal those
of the whole matrix bit for bit if each rank has a multiple of 32 columns. One byte of a residual
cannot be shared by two ranks.

Conversion of optimi's StableAdamW, which is AdamW with update clipping (arXiv 2304.13013).

transformers uses it for ``optim="stable_adamw"``. Bias-corrected moments, clipping by the RMS of
``g / sqrt(v)`` and decoupled decay are what `torch_fp8.ops.adamw` computes with
``FP8Config(update_clipping=True)``.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.nn.optimizer_checks import refuse_training
from torch_fp8.optim.converted import ConvertedOptimizer
from torch_fp8.optim.state import is_large


def without_wrapper(optimizer: Any) -> Any:
    """Return the optimizer within the wrapper of a host (Accelerate, Fabric), or itself."""
    return getattr(optimizer, "optimizer", optimizer)


def check_trained(optimizer: Optimizer, config: FP8Config, model: nn.Module | None) -> None:
    """Check that an optimizer can be converted as configured, and that it trains the model.

    Raises:
        TypeError: the optimizer is not one of torch.
        ValueError: the optimizer has none of the model's parameters, or it has a frozen weight or
            one created inside ``torch.inference_mode()``; or O3 needs the model.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} does not derive from torch.optim.Optimizer, and "
            "convert_optimizer only converts those that do; train with it as it is"
        )
    refuse_training(optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.is_inference() for p in held if not is_lazy(p)):
        raise ValueError(
            f"parameters of {type(optimizer).__name__} were created inside torch.inference_mode(), "
            "and autograd cannot train them; create the model outside it"
        )
    if model is None:
        if config.opt_level == "O3":
            raise ValueError(
                "opt_level='O3' makes the gradients of FP8 layers 8 bits wide: pass the model, "
                "convert_optimizer(optimizer, config, model=model)"
            )
        return
    own = set(model.parameters())
    if held and own and own.isdisjoint(held):
        raise ValueError(
            f"none of the {len(held)} parameters of {type(optimizer).__name__} is one of the "
            f"{len(own)} of {type(model).__name__}; pass the model that it trains as model=. If "
            "the model's parameters have been replaced since (by sharding, for example), make the "
            "optimizer from the new ones"
        )


def check_shardings(optimizer: Optimizer, model: nn.Module | None) -> None:
    """Run `check_sharding` on all parameters that get 8-bit states or a residual.

    Args:
        optimizer: the optimizer, converted or not.
        model: the model that gives the parameters' names, or None if the error numbers them.
    """
    named = {} if model is None else {p: f"'{n}'" for n, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, parameter in enumerate(parameters):
        if is_large(parameter) or parameter.dtype == torch.bfloat16:
            check_sharding(parameter, named.get(parameter, f"parameter {i}"))


def check_sharding(parameter: Tensor, name: str) -> None:
    """Raise ValueError unless 8-bit states can follow a DTensor's sharding.

    Args:
        parameter: the parameter.
        name: the parameter's name for the error.
    """
    if not isinstance(parameter, DTensor):
        return
    placements = enumerate(parameter.placements)
    for axis, placement in ((a, p) for a, p in placements if getattr(p, "dim", 0) != 0):
        ranks, last = parameter.device_mesh.size(axis), parameter.ndim - 1
        if parameter.ndim != 2 or placement.dim != last:
            raise ValueError(
                f"{name} is sharded as {parameter.placements}; 8-bit states and split weights can "
                "only be sharded along rows, or along the columns of a matrix. Keep the optimizer "
                "unchanged with FP8Config(opt_level='O1')"
            )
        if not is_large(parameter) and parameter.shape[last] % ranks:
            raise ValueError(
                f"{name} has {parameter.shape[last]} columns on {ranks} ranks; its residual of 16 "
                f"bits needs a multiple of {ranks}. Use FP8Config(opt_level='O1')"
            )


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
