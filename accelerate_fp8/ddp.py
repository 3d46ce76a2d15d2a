"""DistributedDataParallel as Accelerate creates it, with the engine's options."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from accelerate_fp8.optimizers import PreparedOptimizers
from torch_fp8.distributed.ddp.connection import DDPReport
from torch_fp8.distributed.ddp.wrap import connect_ddp, ddp_options
from torch_fp8.nn.class_swap import without_compiler


def wraps_in_ddp(accelerator: Any) -> bool:
    """Return whether this Accelerator will wrap the models that it trains in DDP."""
    return str(accelerator.distributed_type.value).startswith("MULTI_")


def refuse_sharded_elsewhere(accelerator: Any, model: nn.Module) -> None:
    """Raise ValueError if a model is already sharded and would be wrapped in DDP."""
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
    """Make Accelerate wrap `model` with the options of `ddp_options` in this context.

    The options are from `torch_fp8.distributed.ddp.wrap`. Accelerate's handler cannot distinguish
    an explicit ``gradient_as_bucket_view=False`` from the default.

    Args:
        accelerator: the Accelerator that is about to wrap `model`.
        model: the model, on its device.
        optimizers: the optimizers known so far.
    Raises:
        ValueError: ranks have converted different weights.
    """
    users = accelerator.ddp_handler
    chosen = users.to_kwargs() if users is not None else {}
    options = ddp_options(model, optimizers.that_train(accelerator, model), chosen)
    register = getattr(users, "register_comm_hook", lambda model: None)
    handler = SimpleNamespace(to_kwargs=lambda: options, register_comm_hook=register)
    accelerator.ddp_handler = handler
    try:
        yield
    finally:
        accelerator.ddp_handler = users


def connect_engine(
    accelerator: Any, model: nn.Module, prepared: nn.Module, optimizers: PreparedOptimizers
) -> DDPReport | None:
    """Have DDP exchange gradients in FP8, and remember that `model` is wrapped.

    A hook of DistributedDataParallelKwargs, already registered at this point, takes precedence.

    Args:
        accelerator: the Accelerator that prepared `model`.
        model: the unwrapped model.
        prepared: Accelerate's wrapper of `model`.
        optimizers: see `engine_options`.
    Returns:
        A report on how gradients travel; None if `model` was not wrapped.
    """
    ddp = without_compiler(prepared)
    if not isinstance(ddp, DistributedDataParallel):
        return None
    optimizers.set_wrapped(model, ddp)
    return connect_ddp(ddp, optimizers.that_train(accelerator, model), optimizers.config)
