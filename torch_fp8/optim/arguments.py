"""Checks of the arguments of `torch_fp8.convert_optimizer`, before it changes anything."""

from torch import nn
from torch.optim import Optimizer

from torch_fp8.nn.optimizer_checks import refuse_training


def check_arguments(optimizer: object, model: object) -> None:
    """Check the arguments `optimizer` and `model` of `torch_fp8.convert_optimizer`.

    Args:
        optimizer: the argument that should be an ``Optimizer``.
        model: the argument that should be the ``nn.Module`` it trains, or None.
    Raises:
        TypeError: an argument has another type.
        ValueError: the optimizer has none of the model's parameters, or has a frozen weight.
    """
    if not isinstance(optimizer, Optimizer):
        way_out = "pass the optimizer"
        if isinstance(optimizer, nn.Module):
            way_out = "torch_fp8.convert_to_float8(model, config) converts a model"
        got = type(optimizer).__name__
        raise TypeError(f"convert_optimizer takes a torch.optim.Optimizer, got {got}; {way_out}")
    refuse_training(optimizer)
    if model is None:
        return
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"convert_optimizer(model=...) takes an nn.Module, got {type(model).__name__}; pass "
            "the model that the optimizer trains"
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    own = set(model.parameters())
    if held and own and own.isdisjoint(held):
        raise ValueError(
            f"none of the {len(held)} parameters of {type(optimizer).__name__} is one of the "
            f"{len(own)} of {type(model).__name__}; pass the model that it trains as model=. If "
            "the model's parameters have been replaced since (by sharding, for example), make the "
            "optimizer from the new ones"
        )
