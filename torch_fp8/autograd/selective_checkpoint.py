"""`selective_checkpoint_contexts`: checkpoints of compiled models that keep FP8 tensors.

``torch.utils.checkpoint`` keeps nothing of a region and runs all of it again in backward. With
these contexts, a policy for torch's selective checkpointing, a compiled graph keeps the FP8 tensors
that backward needs and the results of attention. It recomputes only the 16-bit tensors that
backward needs: in a Llama block, the GEMMs of q, k and v with the norm before them, and the rotary
embedding.

Eager code is refused. There, torch's mechanism re-runs every operator whose result was not kept,
even if nothing needs it, and keeps more than training without a checkpoint does.
"""

import functools
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torch_fp8.autograd.current_pass import is_traced

CASTS = (
    "quantize_2d",
    "quantize_2d_sum",
    "rms_norm_statistics",
    "rms_norm_quantize",
    "rms_norm_quantize_once",
    "swiglu_save",
    "swiglu_quantize",
    "swiglu_save_columns",
    "column_amax",
    "smooth_factors",
    "quantize_columns",
)
"""Operators of torch_fp8 that return FP8 payloads, scales and statistics, but no 16-bit tensor."""
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def selective_checkpoint_contexts() -> tuple[Any, Any]:
    """Return the contexts of both passes, for ``checkpoint(..., use_reentrant=False)``.

    Pass the function itself, without calling it, and compile the model:
    ``context_fn=torch_fp8.selective_checkpoint_contexts``. Hugging Face's
    ``gradient_checkpointing_kwargs`` accept it, too. Gradients equal those without checkpointing,
    bit for bit.

    Raises:
        RuntimeError: the region runs in eager mode.
    """
    if not is_traced():
        raise RuntimeError(
            "torch_fp8.selective_checkpoint_contexts only works in regions compiled by "
            "torch.compile, but this one runs in eager mode: compile the model, leave context_fn "
            "out, which keeps the fewest bytes, or use no checkpoint, since FP8 layers save less "
            "than half of BF16's bytes"
        )
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operator_name(func) in CASTS or operator_name(func) in ATTENTION
    for place, argument in enumerate(func._schema.arguments if is_kept else ()):
        if argument.name == "columnwise":  # False: the cast of a weight, or for a frozen layer
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            is_kept = given is not False
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def operator_name(func: Any) -> str:
    """Return an operator's name without overload; "" unless it is torch's or ours."""
    if getattr(func, "namespace", "") not in ("aten", "torch_fp8"):
        return ""
    return func._schema.name.rpartition("::")[2]
