"""`Series`: the named numbers of one step, joined over ranks and fetched at once.

A number's name is ``fp8/<qualified layer>/<kind>/<statistic>``. The names of a run are determined
in advance from the model alone, so all ranks have the same ones in the same order. A number that a
rank has not measured is NaN.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fp8.monitor.statistics import REDUCTIONS
from torch_fp8.ops.one_rank import in_several_ranks

PREFIX = "fp8/"


class Series:
    """The names of a run's statistics.

    Args:
        kinds: the statistics of each ``<qualified layer>/<kind>``, in order.
    """

    def __init__(self, kinds: Mapping[str, Sequence[str]]) -> None:
        self.kinds = dict(kinds)
        names = [(place, name) for place, own in self.kinds.items() for name in own]
        self.names = [f"{PREFIX}{place}/{name}".replace("//", "/") for place, name in names]
        self._worst = {
            place: [-math.inf if REDUCTIONS[name] == "min" else math.inf for name in own]
            for place, own in self.kinds.items()
        }
        reductions = [REDUCTIONS[name] for _, name in names]
        self._signs = [{"max": 1.0, "min": -1.0, "mean": 0.0}[h] for h in reductions]

    def vector(self, seen: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Return all numbers as one float32 vector, NaN for those that were not measured.

        Args:
            seen: the vector of statistics of each place, on any device.
            device: the device of the result.
        """
        parts = []
        for place, own in self.kinds.items():
            value = seen.get(place)
            if value is None:
                parts.append(torch.full((len(own),), torch.nan, device=device, dtype=torch.float32))
            else:  # a measured NaN is the worst value, but NaN here means "not measured"
                value = value.detach().float().to(device)
                worst = torch.tensor(self._worst[place], device=device, dtype=torch.float32)
                parts.append(torch.where(value.isnan(), worst, value))
        return torch.cat(parts) if parts else torch.empty(0, device=device, dtype=torch.float32)

    def joined(self, vector: Tensor) -> list[float]:
        """Join the vectors of all ranks, and fetch the result; the only wait for the device."""
        if in_several_ranks():
            signs = torch.tensor(self._signs, device=vector.device, dtype=torch.float32)
            missing = vector.isnan()
            signed = torch.where(missing, -math.inf, vector * signs)
            of_mean = torch.stack([torch.where(missing, 0.0, vector), (~missing).float()])
            dist.all_reduce(signed, op=dist.ReduceOp.MAX)
            dist.all_reduce(of_mean)
            extreme = torch.where(signed == -math.inf, torch.nan, signed * signs)
            mean = of_mean[0] / of_mean[1]  # NaN if no rank has measured it
            vector = torch.where(signs == 0, mean, extreme)
        return vector.tolist()
