"""FSDP2 as Accelerate applies it, with split float32 shards.

Accelerate itself converts every trainable parameter to float32 before it shards.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from accelerate_fp8.optimizers import PreparedOptimizers, bare
from accelerate_fp8.release import refuse_accumulation
from torch_fp8.checkpoint.adopt_steps import adopt_steps
from torch_fp8.distributed.fsdp.split_weights import split_sharded
from torch_fp8.optim.convert import restore_weights
from torch_fp8.optim.embedding_dtype import restore_output_dtype


def prepare_sharded(
    original: Any, accelerator: Any, optimizers: PreparedOptimizers, args: tuple[Any, ...]
) -> Any:
    """Shard the model among `args`, and convert its optimizers.

    Args:
        original: the method ``Accelerator._prepare_fsdp2``.
        accelerator: the Accelerator that prepares.
        optimizers: the record that keeps their reports.
        args: the arguments of ``prepare``.
    """
    model = next((obj for obj in args if isinstance(obj, nn.Module)), None)
    trained_by = [bare(obj) for obj in args if isinstance(obj, Optimizer)]
    if model is None or not optimizers.enabled:
        return original(accelerator, *args)
    config = optimizers.config
    refuse_accumulation(config, accelerator)
    for optimizer in trained_by:  # float32 again, if the loop itself converted it
        restore_weights(optimizer)
    restore_output_dtype(model)
    prepared = original(accelerator, *args)
    sharded = next(obj for obj in prepared if isinstance(obj, nn.Module))
    reports = split_sharded(sharded, trained_by, config)
    for optimizer, report in zip(trained_by, reports, strict=True):
        optimizers.record(optimizer, report)
    return prepared


def adopt_sharded(models: Iterable[nn.Module], optimizers: Iterable[Any], folder: Any) -> None:
    """Load the optimizers' step counts, which the hosts do not load from folders of shards."""
    if any(isinstance(part, FSDPModule) for model in models for part in model.modules()):
        adopt_steps(folder, map(bare, optimizers))
