"""Checks that Accelerate's loop does not need all gradients at once under gradient release.

With ``FP8Config(gradient_release=True)`` the optimizer has applied and freed each gradient by the
end of backward. The engine itself refuses in backward what Accelerate cannot detect.
"""

from typing import Any

from accelerate.utils import DistributedType

from torch_fp8 import FP8Config

_WAY_OUT = "or leave gradient_release out of the FP8Config"


def refuse_accumulation(config: FP8Config, loop: Any) -> None:
    """Raise ValueError for an Accelerator or TrainingArguments that add up micro-batches."""
    if config.gradient_release and loop.gradient_accumulation_steps > 1:
        _refuse(
            f"gradient_accumulation_steps={loop.gradient_accumulation_steps} adds up gradients",
            "set gradient_accumulation_steps=1",
        )


def refuse_distributed(config: FP8Config, accelerator: Any) -> None:
    """Raise ValueError for DDP; FSDP reduces each gradient before the optimizer gets it."""
    several = accelerator.num_processes > 1
    if config.gradient_release and several and accelerator.distributed_type != DistributedType.FSDP:
        _refuse(
            "DistributedDataParallel averages gradients after they are computed",
            "train in one process",
        )


def refuse_clipping(config: FP8Config, method: str, limit: float) -> None:
    """Raise ValueError if gradients would be changed; an infinite limit only measures them."""
    if config.gradient_release and limit != float("inf"):
        _refuse(
            f"Accelerator.{method} finds no gradients",
            "do not call it (transformers' and TRL's trainers: max_grad_norm=0)",
        )


def refuse_training_arguments(config: FP8Config, arguments: Any) -> None:
    """Raise ValueError for transformers' arguments with which the Trainer accumulates or clips."""
    refuse_accumulation(config, arguments)
    if config.gradient_release and arguments.max_grad_norm:
        _refuse(
            f"max_grad_norm={arguments.max_grad_norm} clips by the norm of all gradients",
            "set max_grad_norm=0",
        )


def _refuse(what: str, instead: str) -> None:
    raise ValueError(
        f"FP8Config(gradient_release=True) frees each gradient in backward, but {what}; "
        f"{instead}, {_WAY_OUT}"
    )
