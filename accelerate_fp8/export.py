"""``FP8Config(save_format=...)``: the hosts save models as inference engines load them.

Checkpoints from which training goes on stay as they are: FP8 weights have no masters.
"""

import os
from typing import Any

from accelerate.utils import DistributedType, extract_model_from_parallel
from torch import nn

from accelerate_fp8.preparation import Preparation, log_visibly
from torch_fp8 import FP8Config
from torch_fp8.checkpoint.export import export_into
from torch_fp8.checkpoint.fold_adapters import adapted_layers


def refuse_sharded_saving(config: FP8Config, distributed_type: DistributedType) -> None:
    """Refuse, before training, what could not be saved after it.

    Raises:
        ValueError: FSDP, under which no rank has whole weights.
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
    """Save a model in the format that was chosen, on the main process.

    Args:
        preparation: whose configuration counts.
        model: a prepared model; wrappers are looked through.
        folder: its other files stay.
        max_shard_size: the size of the tensors in one file.
        is_main_process: the others do nothing.
    Returns:
        False if nothing is to be done: no format was chosen, the folder is a checkpoint to resume
        from, adapters are saved by their own library, or nothing in the model can run in FP8.
    """
    format = preparation.config.save_format
    if format is None or preparation.saves_checkpoint or adapted_layers(model):
        return False
    if preparation.is_left(extract_model_from_parallel(model, keep_torch_compile=False)):
        return False
    if is_main_process:
        report = export_into(model, folder, format, max_shard_size=max_shard_size)
        log_visibly(f"FP8: saved {report}")
    return True


def bound_arguments(signature: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of those that were not given."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
