"""What stepped weights keep for their casts; the rule of ``FP8Config(cache_weights="auto")``.

A weight in two halves keeps its amax if a cast needs it, and its FP8 payload (`Halves.payload`) if
`cache_weights` says so. ``"auto"`` keeps payloads that serve forward and backward, if their bytes
are at most an eighth of the memory that is free for activations: what is free when the optimizer is
converted, without the gradients and moments that training adds. One rank decides for all ranks with
the same weights. Either way training computes the same bits. On the CPU, where casts are emulated,
nothing is gained, and ``"auto"`` keeps nothing.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torch_fp8.nn.experts import Float8Experts
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.scale_buffers import block_of
from torch_fp8.ops.one_rank import answer_of_one, can_ask
from torch_fp8.optim.optimizer import Float8Optimizer
from torch_fp8.tensor.halves import Halves, PayloadCast
from torch_fp8.tensor.scale_table import ScaleTable
from torch_fp8.tensor.split_weight import SplitWeight

SHARE = 8
"""Activations have at least this many times the bytes of the payloads."""
LATER_BYTES = 4
"""Bytes for each parameter that exist after the first step: a BF16 gradient and 8-bit moments."""


def keep_payloads(optimizer: Float8Optimizer, model: nn.Module | None) -> int:
    """Let stepped weights keep their amaxes and, by `cache_weights`, their FP8 payloads.

    Returns:
        The number of weights whose payloads are kept.
    """
    option = optimizer.fp8_config.cache_weights
    if option is True and model is None:
        raise ValueError("FP8Config(cache_weights=True) needs the model: pass model=")
    casts, names = _casts(optimizer, model)
    for halves, cast in casts.items():
        if cast.needs_amax:
            halves.keep_amax()
    if option == "auto":
        casts = {halves: cast for halves, cast in casts.items() if cast.serves_backward}
        if optimizer.fp8_payloads is None and casts:
            optimizer.fp8_payloads = payloads_fit(casts, optimizer)
        option = optimizer.fp8_payloads or False
    for halves, cast in casts.items():
        halves.keep_payload(cast if option else None)
    _unite_scales(casts, names)
    if option and not casts:
        warnings.warn(
            "FP8Config(cache_weights=True) caches nothing: it needs float32 weights, "
            "which O2 and O3 store in two halves. BF16 weights can be written without notice, and "
            "FSDP2 gathers payloads itself. Load the model in float32, or leave cache_weights out",
            stacklevel=3,
        )
    return len(casts) if option else 0


def _unite_scales(casts: Iterable[Halves], names: Mapping[Halves, str]) -> None:
    """Let the payloads of each block's layers keep their scales in one tensor."""
    blocks: dict[Any, list[Halves]] = {}
    for halves in casts:
        if halves.payload is not None and not halves.payload.scale.ndim:
            key = block_of(names[halves]), halves.high.device
            blocks.setdefault(key, []).append(halves)
    for members in blocks.values():
        if len(members) > 1 and None in {halves.table for halves in members}:
            table = ScaleTable(len(members))
            for row, halves in enumerate(members):
                table.keep(halves, row)


def _casts(
    optimizer: Float8Optimizer, model: nn.Module | None
) -> tuple[dict[Halves, PayloadCast], dict[Halves, str]]:
    """Return how layers cast the stepped weights that are stored in two halves, and their names."""
    stepped = {p for _, _, p in optimizer.indexed_parameters() if not isinstance(p, DTensor)}
    casts: dict[Halves, PayloadCast] = {}
    names: dict[Halves, str] = {}
    for module in () if model is None else model.modules():  # compiled ones have no truth value
        if isinstance(module, Float8Layer) and module.fp8.config.backend == "torch":
            transposed, weights = type(module).fp8_transposed, [module.weight]
        elif isinstance(module, Float8Experts):
            transposed, weights = module.is_transposed, list(module.fp8_weights)
        else:
            continue
        cast = PayloadCast.of(module.fp8.recipe.weight, transposed)
        for weight in weights:
            if isinstance(weight, SplitWeight) and weight in stepped:
                casts.setdefault(weight.halves, cast)
                names.setdefault(weight.halves, module.fp8.name)
    return casts, names


def payloads_fit(casts: Mapping[Halves, PayloadCast], optimizer: Optimizer) -> bool:
    """Return whether the payloads fit next to what training will need, by one rank's free memory.

    Args:
        casts: the weights and their casts.
        optimizer: the optimizer that trains them, and perhaps other parameters.
    """
    free = free_bytes(next(iter(casts)).high.device)
    if free is None or not can_ask():
        return False
    payloads = sum(cast.num_bytes(halves) for halves, cast in casts.items())
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    trained = (p for p in parameters if p.requires_grad and not is_lazy(p))
    later = LATER_BYTES * sum(p.numel() for p in trained)
    answer = "keep" if SHARE * payloads <= free - later else "cast"
    return answer_of_one(repr(("payloads", payloads, later)), lambda: answer) == "keep"


def free_bytes(device: torch.device) -> int | None:
    """Return a CUDA device's free bytes, including those that torch caches, or None elsewhere."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
