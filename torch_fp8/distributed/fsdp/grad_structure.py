"""What of a rank's part of FSDP2's gradients travels in 8 bits: the structure of a flat buffer.

FSDP2 reduces the gradients of a parameter group as one buffer, the shards of all parameters one
behind the other. Gradients of FP8 weights travel as codes in groups of 32, which begin anew with
every parameter, all others as BF16.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torch_fp8.distributed.averaging import Run
from torch_fp8.distributed.fsdp.expert_gather import is_expert_weight
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.messages import Layout
from torch_fp8.quantization.formats import GROUP_SIZE


@dataclass(frozen=True)
class Structure:
    """The elements of a rank's part that travel in groups, and those that travel as BF16.

    Attributes:
        grouped: (start, stop) of runs of FP8 weights' gradients; but for the last, or where one
            parameter's shard is no multiple of 32, runs of several parameters are one.
        plain: (start, stop) of all others.
    """

    grouped: tuple[tuple[int, int], ...]
    plain: tuple[tuple[int, int], ...]

    @property
    def layout(self) -> Layout:
        """The layout of a message."""
        groups = sum(-(-(stop - start) // GROUP_SIZE) for start, stop in self.grouped)
        return Layout(groups, sum(stop - start for start, stop in self.plain))

    @property
    def runs(self) -> list[Run]:
        """The same runs for `torch_fp8.distributed.averaging.average_runs`, in order."""
        forms = ((self.grouped, True), (self.plain, False))
        return sorted(Run(*run, in_groups) for runs, in_groups in forms for run in runs)


def structure_of(sizes: list[tuple[int, bool]]) -> Structure:
    """Build the structure of a part that holds shards of these (numel, whether in groups), in
    order.
    """
    grouped: list[tuple[int, int]] = []
    plain: list[tuple[int, int]] = []
    start = 0
    for numel, in_groups in sizes:
        runs = grouped if in_groups else plain
        whole = not in_groups or not runs or (runs[-1][1] - runs[-1][0]) % GROUP_SIZE == 0
        if runs and runs[-1][1] == start and whole:
            runs[-1] = (runs[-1][0], start + numel)
        else:
            runs.append((start, start + numel))
        start += numel
    return Structure(tuple(grouped), tuple(plain))


class GroupStructures:
    """The structures of the buffers of one parameter group.

    Args:
        param_group: FSDP's.
    """

    def __init__(self, param_group: Any) -> None:
        self._param_group = param_group
        self._plain: dict[int, Structure] = {}

    def of(self, numel: int) -> Structure:
        """Return the structure of one rank's part, with `numel` elements."""
        sizes = [
            (param.padded_sharded_param_size.numel(), in_groups(param))
            for param in self._param_group.fsdp_params
            if param.sharded_param.requires_grad
        ]
        if sum(size for size, _ in sizes) == numel:
            return structure_of(sizes)
        if numel not in self._plain:
            name = self._param_group._module_fqn or "the root"
            warnings.warn(
                f"some parameters of {name!r} got no gradient: those of the others, which FSDP "
                "does not name, are reduced in BF16 this time; in FP8 with "
                "set_reduce_scatter_unused_params(True), from torch 2.13 on",
                stacklevel=2,
            )
            self._plain[numel] = structure_of([(numel, False)])
        return self._plain[numel]


def in_groups(param: Any) -> bool:
    """Return whether the gradient of one of FSDP's parameters, if any, travels in 8 bits."""
    info = param._module_info
    if is_expert_weight(info.module, info.param_name):
        return True
    return isinstance(info.module, Float8Layer) and info.param_name == "weight"


def factor_of(op: Any, world_size: int) -> float:
    """Return the factor of a sum that makes it the reduction `op` over so many ranks."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(op.__getstate__()[1])
    raise ValueError(f"gradients are reduced as a sum or an average, not with {op}")
