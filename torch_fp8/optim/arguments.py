"""Errors for wrong calls of `torch_fp8.convert_optimizer`, raised before anything changes."""

from torch import nn
from torch.optim import Optimizer

from torch_fp8.nn.training_guard import refuse_training


def check_arguments(optimizer: object, model: object) -> None:
    """Check the optimizer that is to be converted, and the model that it is said to train.

    Args:
        optimizer: shall be an ``Optimizer``.
        model: shall be the module that it trains, or None.
    Raises:
        TypeError: one of them is something else.
        ValueError: none of the optimizer's parameters is the model's, or one was frozen.
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
