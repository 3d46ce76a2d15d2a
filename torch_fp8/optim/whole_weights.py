"""Weights as they are saved: whole, in the dtype that the user gave them, on the CPU.

At levels O2 and O3 a weight is stored in two halves. A `SplitWeight` reads as the whole one; but a
file that is written from it would take a joined copy of each weight on its device, all at once. The
shards of FSDP2 are joined one by one by torch.distributed.checkpoint.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.tensor.split_weight import SplitWeight


@contextlib.contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Show whole weights to whoever saves `model` within.

    The modules hold other Parameters meanwhile, on the CPU. The trained Parameters, which
    DistributedDataParallel, hooks and optimizers know, are not touched. Nothing may run forward or
    backward within.
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
