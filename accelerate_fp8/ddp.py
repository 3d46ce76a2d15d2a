"""DistributedDataParallel as Accelerate builds it, with the engine's options."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from accelerate_fp8.optimizers import PreparedOptimizers
from torch_fp8.distributed.ddp.hook_registration import DDPReport
from torch_fp8.distributed.ddp.wrap import connect_ddp, ddp_options


class _Handler:
    """A stand-in for the user's DistributedDataParallelKwargs while a model is wrapped."""

    def __init__(self, users: Any, options: dict[str, Any]) -> None:
        self._users, self._options = users, options

    def to_kwargs(self) -> dict[str, Any]:
        return self._options

    def register_comm_hook(self, model: nn.Module) -> None:
        if self._users is not None:
            self._users.register_comm_hook(model)


def wraps_in_ddp(accelerator: Any) -> bool:
    """Return whether this Accelerator is going to wrap the models that it trains."""
    return str(accelerator.distributed_type.value).startswith("MULTI_")


def refuse_sharded_elsewhere(accelerator: Any, model: nn.Module) -> None:
    """Raise ValueError if a model comes sharded and would be wrapped in DistributedDataParallel."""
    if not wraps_in_ddp(accelerator):
        return
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is already sharded, by "
            "from_pretrained(distributed_config=...) or parallelize_module, and Accelerate would "
            "wrap it in DistributedDataParallel, which cannot train it. Load it unsharded and pass "
            "Accelerate FullyShardedDataParallelPlugin(fsdp_version=2), or write your own training "
            "loop (docs/distributed.md)"
        )


@contextlib.contextmanager
def engine_options(
    accelerator: Any, model: nn.Module, optimizers: PreparedOptimizers
) -> Iterator[None]:
    """Have Accelerate, within, wrap `model` with `torch_fp8.distributed.ddp.wrap.ddp_options`.

    Accelerate's handler does not tell ``gradient_as_bucket_view=False`` from no choice.

    Args:
        accelerator: the one that is about to wrap `model`.
        model: the model, on its device.
        optimizers: the optimizers known so far.
    Raises:
        ValueError: ranks that have converted different weights.
    """
    users = accelerator.ddp_handler
    chosen = users.to_kwargs() if users is not None else {}
    options = ddp_options(model, optimizers.that_train(accelerator, model), chosen)
    accelerator.ddp_handler = _Handler(users, options)
    try:
        yield
    finally:
        accelerator.ddp_handler = users


def connect_engine(
    accelerator: Any, model: nn.Module, prepared: nn.Module, optimizers: PreparedOptimizers
) -> DDPReport | None:
    """Have gradients exchanged in FP8, and remember that `model` is wrapped.

    A hook of DistributedDataParallelKwargs, which is registered by now, wins.

    Args:
        accelerator: the one that prepared `model`.
        model: bare.
        prepared: what Accelerate has made of `model`.
        optimizers: see `engine_options`.
    Returns:
        How gradients travel; None if `model` was not wrapped.
    """
    ddp = getattr(prepared, "_orig_mod", prepared)
    if not isinstance(ddp, DistributedDataParallel):
        return None
    optimizers.set_wrapped(model, ddp)
    return connect_ddp(ddp, optimizers.that_train(accelerator, model), optimizers.config)
