"""Joined copies of split weights for saving, on the CPU and in the user's dtype.

At levels O2 and O3 a weight is stored in two halves. A `SplitWeight` reads as the joined weight,
but writing a file from it would hold a joined copy of every weight on its device at once.
torch.distributed.checkpoint joins the shards of FSDP2 one by one.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.tensor.split_weight import SplitWeight


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
