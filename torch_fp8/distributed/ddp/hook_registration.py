"""Registration of our communication hook on DistributedDataParallel, unless the user has one.

DDP accepts one hook, and a user may register it after wrapping the module. So ours is registered as
late as possible: at the first forward, or when a rank joins (uneven inputs) without a forward.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.distributed.ddp.comm_hook import QuantizedAllReduce, average_bucket
from torch_fp8.distributed.ddp.fp8_grad_reducer import Float8GradReducer
from torch_fp8.distributed.links import Exchanges


@dataclass(frozen=True)
class DDPReport:
    """How the gradients of a DistributedDataParallel are averaged.

    Attributes:
        num_ranks: the number of ranks.
        reason: the reason why DDP's buckets are not averaged in FP8; None if they are.
        num_fp8_gradients: the number of weights with 8-bit gradients (O3), averaged beside DDP.
        fp8_exchange: whether these 8-bit gradients travel in FP8.
        note: a note on the choice of ``communication="auto"``; empty if it made none.
    """

    num_ranks: int
    reason: str | None = None
    num_fp8_gradients: int = 0
    fp8_exchange: bool = True
    note: str = ""

    def __str__(self) -> str:
        if self.num_ranks == 1:
            return "1, so nothing is exchanged"
        text = f"{self.num_ranks}, gradients averaged in "
        if self.reason is None:
            return f"{text}FP8, 1.03 bytes each{f', {self.note}' if self.note else ''}"
        if self.num_fp8_gradients and self.fp8_exchange:
            text += f"FP8 if they have 8 bits ({self.num_fp8_gradients}), others in "
        return f"{text}their dtype: {self.reason}"


def users_hook(ddp: DistributedDataParallel) -> str | None:
    """Return the name of the user's communication hook (Python or built in), or None."""
    name = ddp._get_ddp_logging_data().get("comm_hook")
    return None if name in (None, "", average_bucket.__qualname__) else str(name)


def reason_without_hook(ddp: DistributedDataParallel) -> str | None:
    """Return why our hook must not be registered, as far as is known now."""
    name = users_hook(ddp)
    if name is not None:
        return f"the communication hook {name} is registered"
    if torch._dynamo.config.optimize_ddp == "python_reducer":
        return "torch.compile exchanges them itself (optimize_ddp='python_reducer')"
    return None


def connect_hook(
    ddp: DistributedDataParallel, exchanges: Exchanges, beside: Float8GradReducer | None
) -> "HookRegistration":
    """Have our hook average the buckets of `ddp`, unless the first forward finds another hook.

    Args:
        ddp: the DistributedDataParallel of several ranks; a second call changes nothing.
        exchanges: the choice whether buckets travel in 8 bits or in their dtype.
        beside: the reducer of other gradients of `ddp`; None: there is none.
    Returns:
        The registration, which a rank that joins without a forward calls itself.
    """
    for hook in ddp._forward_pre_hooks.values():
        if isinstance(hook, HookRegistration):
            return hook
    registration = HookRegistration(exchanges, beside)
    ddp.register_forward_pre_hook(registration)
    return registration


class HookRegistration:
    """A forward pre-hook that registers the hook; copied with a DDP, it registers on the copy.

    Args:
        exchanges: see `connect_hook`.
        beside: see `connect_hook`.
    """

    def __init__(self, exchanges: Exchanges, beside: Float8GradReducer | None) -> None:
        self._exchanges, self._beside = exchanges, beside
        self._registered = False

    @torch.compiler.disable
    def __call__(self, ddp: DistributedDataParallel, args: Any) -> None:
        if self._registered:
            return
        self._registered = True
        wanted = self._exchanges["average"] or self._beside is not None
        if wanted and reason_without_hook(ddp) is None:
            state = QuantizedAllReduce(ddp.process_group, self._beside, self._exchanges)
            ddp.register_comm_hook(state, average_bucket)
            if self._beside is not None:
                self._beside.leads = True

    def __reduce__(self) -> Any:
        return HookRegistration, (self._exchanges, self._beside)
