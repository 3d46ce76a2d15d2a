"""Checks of the types of a model and an optimizer that a user passes to a public function."""

from torch import nn
from torch.optim import Optimizer


def check_model(model: object, function: str) -> None:
    """Check that an argument is a module.

    Args:
        model: the argument.
        function: name of the function that takes it, for the error.
    Raises:
        TypeError: the argument is not an ``nn.Module``.
    """
    if isinstance(model, nn.Module):
        return
    way_out = "pass the model"
    if isinstance(model, Optimizer) and function in ("convert_to_float8", "conversion_report"):
        way_out = (
            "torch_fp8.convert_optimizer(optimizer, config, model=model) converts an optimizer"
        )
    elif isinstance(model, type) and issubclass(model, nn.Module):
        way_out = "pass an instance of the class"
    raise TypeError(f"{function} takes an nn.Module, got {type(model).__name__}; {way_out}")


def check_optimizer(optimizer: object, function: str) -> None:
    """Check that an argument is an optimizer.

    Args:
        optimizer: the argument.
        function: name of the function that takes it, for the error.
    Raises:
        TypeError: the argument is not an ``Optimizer``.
    """
    if isinstance(optimizer, Optimizer):
        return
    way_out = "pass the optimizer"
    if isinstance(optimizer, nn.Module) and function == "convert_optimizer":
        way_out = "torch_fp8.convert_to_float8(model, config) converts a model"
    got = type(optimizer).__name__
    raise TypeError(f"{function} takes a torch.optim.Optimizer, got {got}; {way_out}")
