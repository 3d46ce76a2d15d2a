"""``FP8Config(save_format=...)``: hosts save models in a format that inference engines load.

Checkpoints for resuming training don't change, because FP8 weights have no master weights.
"""

import inspect
import os
from typing import Any

from accelerate.utils import DistributedType, extract_model_from_parallel
from torch import nn

from accelerate_fp8.backend import RESUMABLE
from accelerate_fp8.preparation import Preparation, log_visibly
from torch_fp8 import FP8Config
from torch_fp8.checkpoint.export import export_into
from torch_fp8.checkpoint.fold_adapters import adapted_layers


def refuse_sharded_saving(config: FP8Config, distributed_type: DistributedType) -> None:
    """Refuse, before training, a set-up whose model could not be saved afterwards.

    Raises:
        ValueError: FSDP is used, under which no rank has whole weights.
    """
    if config.save_format is not None and distributed_type == DistributedType.FSDP:
        raise ValueError(
            f"FP8Config(save_format={config.save_format!r}) writes the weights of one rank, but "
            "FSDP shards them; leave it out, and run torch-fp8 export on the saved checkpoint"
        )


def save_exported(
    preparation: Preparation,
    model: nn.Module,
    folder: str | os.PathLike[str],
    max_shard_size: int | str,
    is_main_process: bool,
) -> bool:
    """Save a model in the configured format, on the main process.

    Args:
        preparation: the Preparation whose configuration applies.
        model: a prepared model, possibly inside wrappers.
        folder: the folder; its other files stay.
        max_shard_size: the maximum size of the tensors in one file.
        is_main_process: whether this is the main process; others do nothing.
    Returns:
        False if there is nothing to do: no format is configured, the folder is a checkpoint for
        resuming, adapters are saved by their own library, or nothing in the model can run in FP8.
    """
    format = preparation.config.save_format
    if format is None or RESUMABLE.get() or adapted_layers(model):
        return False
    if extract_model_from_parallel(model, keep_torch_compile=False) in preparation.left:
        return False
    if is_main_process:
        report = export_into(model, folder, format, max_shard_size=max_shard_size)
        log_visibly(f"FP8: saved {report}")
    return True


def bound_arguments(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of a function by name, including the defaults."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
