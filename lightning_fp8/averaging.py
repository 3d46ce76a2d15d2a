"""The Trainer's callbacks that average weights (EMA, SWA), on weights split into BF16 and residual.

These callbacks read the model's parameters into a float32 average and write the average back, for
validation and at the end. A BF16 parameter alone would give and take 8 bits of significand only:
the average of a run at lr 1e-6 would not move. Here they read the joined weight, and what they
write is split again; so training goes on bit for bit after a validation with averaged weights.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.optim.convert import join_parameter
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.optim.state import split_weight


class SplitWeights:
    """Float32 access to the weights that `optimizers` have split."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._owner = {
            parameter: optimizer
            for optimizer in optimizers
            if isinstance(optimizer, Float8Optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.dtype == torch.bfloat16 and not isinstance(parameter, DTensor)
        }

    def read(self, tensor: Tensor) -> Tensor:
        """Join a split weight; return any other tensor itself."""
        owner = self._owner.get(tensor)
        return tensor.detach() if owner is None else join_parameter(owner, tensor)

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Copy `value` into a split weight and its residual, or into any other tensor."""
        owner = self._owner.get(tensor)
        if owner is None:
            tensor.detach().copy_(value)
            return
        whole = value.detach().to(tensor.device, torch.float32)
        high, residual = split_weight(whole, owner.residual_bits(tensor))
        tensor.detach().copy_(high)
        owner.set_residual(tensor, residual)

    def view(self, model: nn.Module) -> Any:
        """Return what averaging functions take for `model`; it joins one weight at a time."""
        return SimpleNamespace(
            parameters=lambda: map(self.read, model.parameters()), buffers=model.buffers
        )

    @torch.no_grad()
    def swap(self, average: nn.Module, model: nn.Module) -> None:
        """Swap weights, as ``WeightAveraging._swap_models`` does."""
        for averaged, current in _pairs(average, model):
            joined = self.read(current).clone()
            self.write(current, averaged)
            averaged.detach().copy_(joined)

    @torch.no_grad()
    def copy(self, average: nn.Module, model: nn.Module) -> None:
        """Copy weights, as ``WeightAveraging._copy_average_to_current`` does."""
        for averaged, current in _pairs(average, model):
            self.write(current, averaged)

    @torch.no_grad()
    def transfer(self, average: nn.Module, model: nn.Module) -> None:
        """Transfer weights, as ``StochasticWeightAveraging.transfer_weights`` does."""
        for averaged, current in zip(average.parameters(), model.parameters(), strict=True):
            self.write(current, averaged)


def average_whole_weights(callbacks: Iterable[Any], weights: SplitWeights) -> Callable[[], None]:
    """Make the averaging callbacks among `callbacks` read and write through `weights`.

    Returns:
        What undoes it.
    """
    replaced: list[tuple[Any, str]] = []

    def replace(owner: Any, name: str, function: Any) -> None:
        if _is_stock(type(owner), name):
            vars(owner)[name] = function
            replaced.append((owner, name))

    for callback in callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if "WeightAveraging" in names:
            average = callback._average_model
            replace(average, "update_parameters", _update_parameters(average, weights))
            replace(callback, "_swap_models", _with_average(weights.swap, average))
            replace(callback, "_copy_average_to_current", _with_average(weights.copy, average))
        elif "StochasticWeightAveraging" in names:
            replace(callback, "update_parameters", _update_swa(callback, weights))
            replace(callback, "transfer_weights", weights.transfer)

    def undo() -> None:
        for owner, name in replaced:
            vars(owner).pop(name, None)

    return undo


def _is_stock(cls: type, name: str) -> bool:
    """Return whether a method is the host's or torch's; one that a user wrote is not replaced."""
    owner = next(base for base in cls.__mro__ if name in vars(base))
    return owner.__name__ in ("AveragedModel", "WeightAveraging", "StochasticWeightAveraging")


def _update_parameters(average: Any, weights: SplitWeights) -> Callable[[nn.Module], None]:
    return lambda model: type(average).update_parameters(average, weights.view(model))


def _update_swa(callback: Any, weights: SplitWeights) -> Callable[..., None]:
    update = type(callback).update_parameters

    def update_parameters(average: nn.Module, model: nn.Module, *args: Any) -> None:
        update(average, weights.view(model), *args)

    return update_parameters


def _with_average(
    function: Callable[[nn.Module, nn.Module], None], average: Any
) -> Callable[[nn.Module], None]:
    return lambda model: function(average.module, model)


def _pairs(average: nn.Module, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(
        chain(average.parameters(), average.buffers()),
        chain(model.parameters(), model.buffers()),
        strict=True,
    )
