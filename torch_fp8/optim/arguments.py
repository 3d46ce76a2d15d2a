"""Checks of the arguments of `torch_fp8.convert_optimizer`, before it changes anything."""

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torch_fp8.nn.argument_types import check_optimizer
from torch_fp8.nn.optimizer_checks import refuse_training


def check_arguments(optimizer: object, model: object) -> None:
    """Check the arguments `optimizer` and `model` of `torch_fp8.convert_optimizer`.

    Args:
        optimizer: the argument that should be an ``Optimizer``.
        model: the argument that should be the ``nn.Module`` it trains, or None.
    Raises:
        TypeError: an argument has another type.
        ValueError: the optimizer has none of the model's parameters, or it has a frozen weight or
            one created inside ``torch.inference_mode()``.
    """
    check_optimizer(optimizer, "convert_optimizer")
    assert isinstance(optimizer, Optimizer)
    refuse_training(optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.is_inference() for p in held if not is_lazy(p)):
        raise ValueError(
            f"parameters of {type(optimizer).__name__} were created inside torch.inference_mode(), "
            "and autograd cannot train them; create the model outside it"
        )
    if model is None:
        return
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"convert_optimizer(model=...) takes an nn.Module, got {type(model).__name__}; pass "
            "the model that the optimizer trains"
        )
    own = set(model.parameters())
    if held and own and own.isdisjoint(held):
        raise ValueError(
            f"none of the {len(held)} parameters of {type(optimizer).__name__} is one of the "
            f"{len(own)} of {type(model).__name__}; pass the model that it trains as model=. If "
            "the model's parameters have been replaced since (by sharding, for example), make the "
            "optimizer from the new ones"
        )
