"""Optimizers as users pass them: wrapped by a host, or wrong."""

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torch_fp8.config import FP8Config
from torch_fp8.nn.optimizer_checks import refuse_training


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
