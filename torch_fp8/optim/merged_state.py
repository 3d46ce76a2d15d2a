"""Export a model's weights as plain CPU tensors, all at once or one at a time.

At levels O2 and O3 a trained weight is stored as BF16 and a residual, and a frozen weight may be
stored as FP8 only. The functions return the weights that a stock run would have.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_fp8.optim.residual import join_weight, residual_of
from torch_fp8.quantization.argument_types import check_arguments
from torch_fp8.tensor.split_weight import SplitWeight


@torch.no_grad()
def merged_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return ``model.state_dict()`` on the CPU, with each weight joined with its residual.

    Weights are joined one at a time, so their device holds at most one joined weight.

    Args:
        model: the model that the optimizer trains, or its DistributedDataParallel wrapper.
        optimizer: one or several optimizers; only those that `convert_optimizer` has converted
            keep residuals, and other weights are copied unchanged.
        dtype: the dtype of the floating-point parameters in the result; buffers keep theirs.
    Returns:
        A dict with the keys of ``model.state_dict()`` and plain CPU tensors.
    Raises:
        ValueError: the model is on the meta device; or it is sharded: gather it with
            torch.distributed.checkpoint.state_dict.
    """
    check_arguments(merged_state_dict, locals())
    owner, joined = _owners(optimizer), dict[Tensor, Tensor]()
    merged = {}
    for name, value in _state(model).items():
        if isinstance(value, nn.Parameter) and value not in joined:
            joined[value] = _merged(value, owner, dtype)
        merged[name] = joined[value] if isinstance(value, nn.Parameter) else _copied(value)
    return merged


def stream_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield the items of `merged_state_dict` one by one, and create each weight only when needed.

    If you release each weight before you request the next, as file writers and the
    ``load_weights`` of inference engines do, memory holds a copy of one weight, not of the model.

    Args:
        model, optimizer: see `merged_state_dict`.
        dtype: the dtype of floating-point parameters, or None for BF16 if a weight is stored as FP8
            only, float32 if it has a residual, and its own dtype otherwise.
    Yields:
        Pairs of a key of ``model.state_dict()``, in its order, and a plain CPU tensor. A tied
        weight is yielded once for each of its keys.
    Raises:
        ValueError: see `merged_state_dict`.
    """
    check_arguments(stream_state_dict, locals())
    owner = _owners(optimizer)
    for name, value in _state(model).items():
        yield name, _merged(value, owner, dtype)


def _state(model: nn.Module) -> dict[str, Any]:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, DTensor):
            raise ValueError(
                f"{name!r} is sharded; gather the model's and the optimizer's state with "
                "torch.distributed.checkpoint.state_dict instead"
            )
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values; load them first")
    return state


def _owners(optimizer: Optimizer | Iterable[Optimizer]) -> dict[Tensor, Optimizer]:
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    return {p: o for o in optimizers for g in o.param_groups for p in g["params"]}


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def _merged(value: Any, owner: dict[Tensor, Optimizer], dtype: torch.dtype | None) -> Any:
    if not isinstance(value, nn.Parameter) or not value.is_floating_point():
        return _copied(value)
    whole = value.detach()
    if value in owner and (dtype is not None or residual_of(value) is not None):
        whole = join_weight(value)
    return whole.to(device="cpu", dtype=dtype or whole.dtype, copy=True)


@contextlib.contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Replace split weights of `model` with joined CPU Parameters, for saving, in this context.

    The trained Parameters, which DistributedDataParallel, hooks and optimizers refer to, do not
    change. Don't run forward or backward in this context.
    """
    replaced: list[tuple[dict[str, Any], str, SplitWeight]] = []
    joined: dict[Tensor, nn.Parameter] = {}
    try:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if not isinstance(parameter, SplitWeight):
                    continue
                if parameter not in joined:
                    whole = parameter.halves.join(torch.device("cpu"))
                    joined[parameter] = nn.Parameter(whole, parameter.requires_grad)
                replaced.append((module._parameters, name, parameter))
                module._parameters[name] = joined[parameter]
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter
