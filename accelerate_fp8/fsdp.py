"""FSDP2 as Accelerate applies it: weights become BF16 before it, and stay so.

Accelerate itself makes every trainable parameter float32 before it shards them.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from accelerate_fp8.optimizers import PreparedOptimizers, bare
from accelerate_fp8.release import refuse_accumulation
from torch_fp8.distributed.fsdp.split_weights import shard_residuals, split_for_sharding


class WithoutUpcast:
    """An Accelerator as ``fsdp2_prepare_model`` sees it where the weights have their dtype already.

    ``fsdp2_prepare_model`` reads ``mixed_precision`` only to decide on the upcast.
    """

    mixed_precision = "no"

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def prepare_sharded(
    original: Any, accelerator: Any, optimizers: PreparedOptimizers, args: tuple[Any, ...]
) -> Any:
    """Shard the model among `args` with its optimizers converted.

    A model that was sharded before keeps its dtype; so does one with an optimizer that is left
    alone, or whose policy names no dtype to compute in. The optimizers' reports say so.

    Args:
        original: ``Accelerator._prepare_fsdp2``.
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
    plugin, splits = accelerator.state.fsdp_plugin, {}
    already_sharded = isinstance(getattr(model, "_orig_mod", model), FSDPModule)
    # FSDP2 computes in this dtype, without autocast; in float32 if there is none.
    computes_in = getattr(plugin.mixed_precision_policy, "param_dtype", None)
    if computes_in is not None and not already_sharded:
        splits = split_for_sharding(model, trained_by, config)
    optimizers.keep_dtype = bool(splits)
    try:
        prepared = original(accelerator, *args)
    finally:
        optimizers.keep_dtype = False
    sharded = next(obj for obj in prepared if isinstance(obj, nn.Module))
    from_rank0 = plugin.cpu_ram_efficient_loading
    reports = shard_residuals(sharded, trained_by, splits, config, from_rank0=from_rank0)
    for optimizer, report in zip(trained_by, reports, strict=True):
        optimizers.record(optimizer, report)
    return prepared
