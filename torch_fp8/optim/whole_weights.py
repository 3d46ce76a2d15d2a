"""Weights as they are saved: BF16 and residual joined, in the dtype that the user gave them.

While a model trains at level O2 or O3, its large weights are BF16 Parameters and their lower bits
are in the optimizer. A model that is saved for others to load is to be the model that a stock run
would save: one dtype, whole weights. Loaded again, such weights fall into the same two parts.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_fp8.nn.class_swap import unwrapped_name
from torch_fp8.optim.convert import join_parameter
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.optim.state import split_weight
from torch_fp8.tensor.dtensor import with_data


@contextlib.contextmanager
def whole_weights(
    model: nn.Module, optimizers: Iterable[Optimizer], *, keep_changes: bool = False
) -> Iterator[int]:
    """Show whole weights to whoever saves `model` within; yield the number of joined ones.

    The modules hold other Parameters meanwhile, on the CPU, those of a sharded model as shards on
    their device. The trained Parameters, which DistributedDataParallel, hooks and optimizers know,
    are not touched. Nothing may run forward or backward within.

    Args:
        model: wrapped or not.
        optimizers: the optimizers that train it; others do not matter.
        keep_changes: whether what is loaded into the model within is split and stays; of a model
            that is not sharded.
    """
    owners = _owners(optimizers)
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    joined: dict[Tensor, nn.Parameter] = {}
    try:
        for module in model.modules() if owners else ():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter not in owners:
                    continue
                if parameter not in joined:
                    joined[parameter] = _joined(owners[parameter], parameter)
                replaced.append((module._parameters, name, parameter))
                module._parameters[name] = joined[parameter]
        yield len(joined)
        for parameter, whole in joined.items() if keep_changes else ():
            _write(owners[parameter], parameter, whole)
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


@torch.no_grad()
def split_loaded(
    model: nn.Module, optimizers: Iterable[Optimizer], state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Split the whole weights in `state_dict`, as `model` has them, for ``model.load_state_dict``.

    The residuals go to the optimizers. So what `whole_weights` showed comes back bit for bit, where
    a plain copy would round to BF16.

    Args:
        model: not sharded.
        optimizers: the optimizers that train it.
        state_dict: a state of this model; float32 entries of split Parameters are split.
    """
    owners = _owners(optimizers)
    split = dict(state_dict)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = name if name in split else unwrapped_name(name).removeprefix("module.")
        value, owner = split.get(key), owners.get(parameter)
        if owner is None or not isinstance(value, Tensor) or isinstance(parameter, DTensor):
            continue
        if value.dtype == torch.float32 and value.shape == parameter.shape:
            split[key] = _split(owner, parameter, value)
    return split


def _owners(optimizers: Iterable[Optimizer]) -> dict[Tensor, Float8Optimizer]:
    """Map each split Parameter to its optimizer."""
    return {
        parameter: optimizer
        for optimizer in optimizers
        if isinstance(optimizer, Float8Optimizer)
        for _, _, parameter in optimizer.indexed_parameters()
        if optimizer.original_dtype(parameter) != parameter.dtype
    }


def _split(optimizer: Float8Optimizer, parameter: Tensor, whole: Tensor) -> Tensor:
    """Return the BF16 part of `whole`; its residual goes to the optimizer."""
    bits = optimizer.residual_bits(parameter)
    high, residual = split_weight(whole.detach().to(parameter.device, torch.float32), bits)
    optimizer.set_residual(parameter, residual)
    return high


@torch.no_grad()
def _write(optimizer: Float8Optimizer, parameter: Tensor, whole: Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(_split(optimizer, parameter, whole))


@torch.no_grad()
def _joined(optimizer: Float8Optimizer, parameter: Tensor) -> nn.Parameter:
    whole = join_parameter(optimizer, parameter).to(optimizer.original_dtype(parameter))
    tensor = with_data(parameter, whole) if isinstance(parameter, DTensor) else whole.cpu()
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)
