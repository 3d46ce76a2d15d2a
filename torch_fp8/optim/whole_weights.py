"""Weights as they are saved: whole, in the dtype that the user gave them, on the CPU.

At levels O2 and O3 a weight is stored in two halves. A `SplitWeight` reads as the whole one; but a
file that is written from it would take a joined copy of each weight on its device, all at once. The
weights that FSDP2 has sharded are BF16 Parameters, and their lower bits are in the optimizer.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.optim.convert import join_parameter
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.tensor.dtensor import with_data
from torch_fp8.tensor.split_weight import SplitWeight


@contextlib.contextmanager
def whole_weights(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[int]:
    """Show whole weights to whoever saves `model` within; yield the number of sharded ones.

    The modules hold other Parameters meanwhile, on the CPU, those of a sharded model as shards on
    their device. The trained Parameters, which DistributedDataParallel, hooks and optimizers know,
    are not touched. Nothing may run forward or backward within.

    Args:
        model: wrapped or not.
        optimizers: the optimizers that train it; others do not matter.
    """
    owners = _owners(optimizers)
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    joined: dict[Tensor, nn.Parameter] = {}
    try:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if not isinstance(parameter, SplitWeight) and parameter not in owners:
                    continue
                assert parameter is not None
                if parameter not in joined:
                    joined[parameter] = _joined(owners.get(parameter), parameter)
                replaced.append((module._parameters, name, parameter))
                module._parameters[name] = joined[parameter]
        yield sum(isinstance(parameter, DTensor) for parameter in joined)
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


def _owners(optimizers: Iterable[Optimizer]) -> dict[Tensor | None, Float8Optimizer]:
    """Map each sharded weight that is split to its optimizer."""
    return {
        parameter: optimizer
        for optimizer in optimizers
        if isinstance(optimizer, Float8Optimizer)
        for _, _, parameter in optimizer.indexed_parameters()
        if optimizer.original_dtype(parameter) != parameter.dtype
    }


@torch.no_grad()
def _joined(optimizer: Float8Optimizer | None, parameter: Tensor) -> nn.Parameter:
    if isinstance(parameter, SplitWeight):
        tensor = parameter.halves.join(torch.device("cpu"))
    else:
        assert optimizer is not None
        whole = join_parameter(optimizer, parameter).to(optimizer.original_dtype(parameter))
        tensor = with_data(parameter, whole)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)
