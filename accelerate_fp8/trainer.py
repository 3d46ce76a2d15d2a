"""transformers' TrainingArguments and Trainer, and TRL's subclasses, under this engine.

`accelerate_fp8._register` installs these functions. Each takes the wrapped method as its first
argument, followed by the method's arguments.
"""

import contextlib
import os
from typing import Any

from torch import Tensor, nn
from transformers.utils import logging

from accelerate_fp8.accelerator import preparation_of
from accelerate_fp8.backend import SAMPLES, holding, is_engine_chosen
from torch_fp8.checkpoint.adopt import SAVED_DEQUANTIZED, save_dequantized
from torch_fp8.nn.logit_losses import log_probs
from torch_fp8.optim.merged_state import whole_weights

_PRECISION = "ACCELERATE_MIXED_PRECISION"


def post_init(original: Any, self: Any) -> None:
    """Extend ``TrainingArguments.__post_init__`` under ``ACCELERATE_MIXED_PRECISION=fp8``.

    ``bf16=True`` makes the Trainer pass "bf16" to Accelerate, and TRL's configurations set it by
    default, so every TRL trainer would silently train in BF16. FP8 includes BF16 autocast, so the
    launcher's flag wins; an explicit ``bf16=True`` in a script cannot be distinguished from the
    default. ``fp16=True`` stays. transformers 4 has no attribute ``mixed_precision``; it overwrites
    the launcher's variable.
    """
    ours = is_engine_chosen((), explicit=False)
    original(self)
    in_environment = not hasattr(self, "mixed_precision")
    chosen = os.environ.get(_PRECISION) if in_environment else self.mixed_precision
    if not ours or chosen != "bf16":
        return
    if in_environment:
        os.environ[_PRECISION] = "fp8"
    else:
        self.mixed_precision = "fp8"
    warn_once(
        "FP8: bf16=True in the training arguments (TRL's default) is overridden by "
        "--mixed_precision fp8, which includes BF16 autocast"
    )


def create_accelerator_and_postprocess(original: Any, self: Any) -> None:
    """Extend ``Trainer.create_accelerator_and_postprocess``: choose ``auto`` for rollouts.

    A trainer samples if its arguments have a temperature and a completion length, as TRL's do.
    """
    lengths = ("max_completion_length", "max_new_tokens")
    samples = any(hasattr(self.args, name) for name in lengths)
    with holding(SAMPLES, samples and hasattr(self.args, "temperature")):
        original(self)


def save_optimizer_and_scheduler(original: Any, self: Any, output_dir: str) -> None:
    """Extend ``Trainer._save_optimizer_and_scheduler``: also save delayed scaling's history."""
    original(self, output_dir)
    where = output_dir, self.args.process_index, self.args.should_save
    preparation_of(self.accelerator).save([self.model], *where)


def load_optimizer_and_scheduler(original: Any, self: Any, checkpoint: str | None) -> None:
    """Extend ``Trainer._load_optimizer_and_scheduler``: also load delayed scaling's history."""
    original(self, checkpoint)
    if checkpoint is not None:
        own = [self.model], [self.optimizer], checkpoint, self.args.process_index
        preparation_of(self.accelerator).load(*own)


def save(original: Any, self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
    """Extend ``Trainer._save``: save joined weights in checkpoints and in the final model."""
    with whole_weights(self.model) if self.args.should_save else contextlib.nullcontext():
        original(self, output_dir, state_dict)


def save_pretrained(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``PreTrainedModel.save_pretrained``: save joined weights and their dtype.

    A model that transformers dequantized is not quantized again, even if it was never prepared (for
    example after a merge of adapters).
    """
    is_ours = "_fp8_prepared" in vars(self) or is_engine_chosen((), explicit=False)
    if is_ours and save_dequantized(self):
        warn_once(f"FP8: {SAVED_DEQUANTIZED}")
    with whole_weights(self):
        return original(self, *args, **kwargs)


def wrap_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Extend ``Trainer._wrap_model``: refuse a wrapper that bypasses Accelerate.

    Raises:
        ValueError: one process sees several GPUs, so the Trainer would use DataParallel.
    """
    model = original(self, *args, **kwargs)
    if kwargs.get("training", True) and self.is_in_train:
        preparation_of(self.accelerator).serve(self)
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            "the Trainer wraps the model in DataParallel because this one process sees "
            f"{self.args.n_gpu} GPUs; Accelerate then does not prepare it, and FP8 would not run. "
            "Launch one process per GPU (accelerate launch --multi_gpu), or set "
            "CUDA_VISIBLE_DEVICES to one"
        )
    return model


def prepare_fsdp(original: Any, model: nn.Module, accelerator: Any) -> nn.Module:
    """Extend TRL's ``prepare_fsdp``: a reference model runs the same FP8 as the trained model."""
    preparation = preparation_of(accelerator)
    preparation.convert(model, accelerator.device, evaluation_mode=True)
    sharded = original(model, accelerator)
    preparation.connect_sharded(model, sharded, evaluation_mode=True)
    return sharded


def warn_once(message: str) -> None:
    """Warn on rank zero, even before Accelerate's own logger is ready."""
    if int(os.environ.get("RANK", "0")) == 0:
        logging.get_logger("transformers").warning_once(message)


def selective_log_softmax(
    original: Any, logits: Any, index: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Extend TRL's function: the log-probabilities of uncomputed logits need no logits."""
    options = dict(zip(("temperature", "row_mask"), args, strict=False)) | kwargs
    log_p: Any = log_probs(logits, index, options.get("temperature", 1.0))
    if log_p is NotImplemented:
        log_p = original(logits, index, *args, **kwargs)
    elif options.get("row_mask") is not None:
        log_p = log_p.masked_fill(options["row_mask"] == 0, 0.0)
    return log_p
