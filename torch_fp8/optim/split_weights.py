"""Split the float32 weights that an optimizer trains, all or none, and join them again."""

import gc
import warnings
from collections.abc import Iterable

from torch import Tensor

from torch_fp8.tensor.split_weight import SplitWeight, join_parameter, split_parameter
from torch_fp8.tensor.swap import REFERRED, swappable


def split_parameters(parameters: Iterable[Tensor]) -> None:
    """Split each float32 Parameter (`torch_fp8.tensor.split_weight`).

    If that fails for one of them, for example for lack of memory, those before it are joined again.

    Args:
        parameters: leaves that are not sharded and that torch can swap (`torch_fp8.tensor.swap`).
    """
    split: list[Tensor] = []
    try:
        for parameter in parameters:
            split.append(split_parameter(parameter))
    except BaseException:
        join_parameters(split)
        raise


def join_parameters(parameters: Iterable[Tensor]) -> int:
    """Turn each `SplitWeight` back into a plain float32 Parameter, and return their number.

    A weight that torch cannot swap stays split, with one warning for all.
    """
    split = [parameter for parameter in parameters if isinstance(parameter, SplitWeight)]
    if not all(map(swappable, split)):
        gc.collect()  # a profiler that was deleted is part of a cycle
    joined = [parameter for parameter in split if swappable(parameter)]
    for parameter in joined:
        join_parameter(parameter)
    if len(joined) < len(split):
        warnings.warn(
            f"{len(split) - len(joined)} of {len(split)} weights stay stored in two halves, "
            f"because {REFERRED}, and torch then refuses to change their storage. They read and "
            "write as float32 weights. To make them plain, delete the profiler object and call "
            "torch_fp8.revert(model)",
            stacklevel=4,
        )
    return len(joined)
