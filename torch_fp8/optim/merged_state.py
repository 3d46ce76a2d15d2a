"""A model's weights for others: whole, plain and on the CPU, all at once or one after the other.

At level O2 and O3 a trained weight is stored as BF16 and a residual, and a weight that nobody
trains may be stored as FP8 alone. Here both are what a stock run would have.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_fp8.optim.residual import join_weight, residual_of


@torch.no_grad()
def merged_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return ``model.state_dict()`` with every weight joined with its residual, on the CPU.

    Weights are joined one at a time, so that their device never holds more than one joined weight.

    Args:
        model: the model that the optimizer trains, or its DistributedDataParallel.
        optimizer: one that `convert_optimizer` has converted, or several; the weights of others are
            taken as they are.
        dtype: the dtype of the floating-point parameters in the result; buffers keep theirs.
    Returns:
        The keys of ``model.state_dict()``, with plain tensors on the CPU.
    Raises:
        ValueError: the model is sharded; torch.distributed.checkpoint.state_dict gathers its
            weights.
    """
    owner, joined = _owners(optimizer), dict[Tensor, Tensor]()
    merged = {}
    for name, value in _state(model).items():
        if isinstance(value, nn.Parameter) and value not in joined:
            joined[value] = _merged(value, owner.get(value), dtype)
        merged[name] = joined[value] if isinstance(value, nn.Parameter) else _copied(value)
    return merged


def stream_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield what `merged_state_dict` returns, each weight made when its turn comes.

    Who lets go of one before asking for the next, as a writer of files or an inference engine's
    ``load_weights`` does, never holds a second copy of the model, only of one weight.

    Args:
        model, optimizer: see `merged_state_dict`.
        dtype: the dtype of floating-point parameters. None: BF16 for weights that are stored as FP8
            alone, float32 for those with a residual, and else their own.
    Yields:
        The keys of ``model.state_dict()``, in its order, and plain tensors on the CPU. Weights that
        are tied come once for each key.
    Raises:
        ValueError: see `merged_state_dict`.
    """
    owner = _owners(optimizer)
    for name, value in _state(model).items():
        with torch.no_grad():
            if isinstance(value, nn.Parameter):
                yield name, _merged(value, owner.get(value), dtype)
            else:
                yield name, _copied(value)


def _state(model: nn.Module) -> dict[str, Any]:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, DTensor):
            raise ValueError(
                f"{name!r} is sharded; gather the model's and the optimizer's state with "
                "torch.distributed.checkpoint.state_dict instead"
            )
    return state


def _owners(optimizer: Optimizer | Iterable[Optimizer]) -> dict[Tensor, Optimizer]:
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    return {p: o for o in optimizers for g in o.param_groups for p in g["params"]}


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _merged(parameter: Tensor, optimizer: Optimizer | None, dtype: torch.dtype | None) -> Tensor:
    if not parameter.is_floating_point():
        return parameter.detach().cpu().clone()
    whole = parameter.detach()
    if optimizer is not None and (dtype is not None or residual_of(parameter) is not None):
        whole = join_weight(parameter)
    return whole.to(device="cpu", dtype=dtype or whole.dtype, copy=True)
