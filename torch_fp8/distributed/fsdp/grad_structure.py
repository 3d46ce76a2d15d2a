"""The structure of FSDP2's flat gradient buffers: which elements travel in 8 bits.

FSDP2 reduces the gradients of a parameter group as one buffer, with the shards of all parameters
one after another. Gradients of FP8 weights travel as codes in groups of 32, which start anew with
every parameter; all others travel as BF16.
"""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from torch_fp8.distributed.averaging import Run, by_form, runs_of
from torch_fp8.distributed.fsdp.expert_gather import is_expert_weight
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.messages import Layout
from torch_fp8.quantization.formats import GROUP_SIZE


def layout_of(runs: Sequence[Run]) -> Layout:
    """Return the layout of a message with these runs."""
    grouped, plain = by_form(runs)
    groups = sum(-(-(run.stop - run.start) // GROUP_SIZE) for run in grouped)
    return Layout(groups, sum(run.stop - run.start for run in plain))


def structure_of(sizes: Sequence[tuple[int, bool]]) -> list[Run]:
    """Return the runs of a part with shards of these (numel, whether in groups)."""
    stops = itertools.accumulate(numel for numel, _ in sizes)
    pieces = zip(stops, sizes, strict=True)
    return runs_of((stop - numel, numel, in_groups) for stop, (numel, in_groups) in pieces)


class GroupStructures:
    """The structures of one parameter group's buffers.

    Args:
        param_group: FSDP's parameter group.
        name: the qualified name of its module.
    """

    def __init__(self, param_group: Any, name: str) -> None:
        self._param_group, self._name = param_group, name
        self._plain: dict[int, list[Run]] = {}

    def of(self, numel: int) -> list[Run]:
        """Return the structure of one rank's part with `numel` elements."""
        sizes = [
            (param.padded_sharded_param_size.numel(), in_groups(param))
            for param in self._param_group.fsdp_params
            if param.sharded_param.requires_grad
        ]
        if sum(size for size, _ in sizes) == numel:
            return structure_of(sizes)
        if numel not in self._plain:
            warnings.warn(
                f"some parameters of {self._name!r} got no gradient, and FSDP does not report "
                "which: the other gradients are reduced in BF16 this time. To reduce them in FP8, "
                "call set_reduce_scatter_unused_params(True) (torch 2.13 or later)",
                stacklevel=2,
            )
            self._plain[numel] = structure_of([(numel, False)])
        return self._plain[numel]


def in_groups(param: Any) -> bool:
    """Return whether the gradient of one of FSDP's parameters travels in 8 bits."""
    info = param._module_info
    if is_expert_weight(info.module, info.param_name):
        return True
    return isinstance(info.module, Float8Layer) and info.param_name == "weight"


def factor_of(op: Any, world_size: int) -> float:
    """Return the factor by which a sum over `world_size` ranks becomes the reduction `op`."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(op.__getstate__()[1])
    raise ValueError(f"gradients can be reduced as a sum or an average, not with {op}")
