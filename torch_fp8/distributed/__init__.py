"""FP8 between ranks: the public names for DDP, FSDP2 and tensor parallelism.

A name's module is imported when the name is first used, because the engine needs few of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_fp8.distributed.ddp.connection import DDPReport
    from torch_fp8.distributed.ddp.wrap import connect_ddp, ddp_options
    from torch_fp8.distributed.fsdp.connect import FSDPReport, connect_fsdp
    from torch_fp8.distributed.fsdp.split_weights import join_sharded, split_sharded
    from torch_fp8.distributed.tensor_parallel.styles import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

_MODULES = {
    "ddp.connection": "DDPReport",
    "ddp.wrap": "connect_ddp ddp_options",
    "fsdp.connect": "FSDPReport connect_fsdp",
    "fsdp.split_weights": "join_sharded split_sharded",
    "tensor_parallel.styles": (
        "Float8ColwiseParallel Float8RowwiseParallel PrepareFloat8ModuleInput"
    ),
}
_OWNERS = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "DDPReport",
    "FSDPReport",
    "Float8ColwiseParallel",
    "Float8RowwiseParallel",
    "PrepareFloat8ModuleInput",
    "connect_ddp",
    "connect_fsdp",
    "ddp_options",
    "join_sharded",
    "split_sharded",
]


def __getattr__(name: str) -> Any:
    if name in ("CommunicationCount", "count_communication"):  # removed: the error says more
        return getattr(importlib.import_module("torch_fp8"), name)
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_OWNERS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
