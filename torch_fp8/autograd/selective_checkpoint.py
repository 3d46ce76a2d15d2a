"""`selective_checkpoint_contexts`: checkpoints of compiled models that keep FP8.

``torch.utils.checkpoint`` keeps nothing of a region and runs all of it again in backward. Given
these contexts, a compiled graph keeps the FP8 tensors that backward needs and what attention
returns, by a policy for torch's own selective checkpointing, and runs again what leads to 16-bit
tensors that backward needs. Of a Llama block these are the GEMMs of q, k and v with the norm before
them, and the rotation.

Eager code is refused: there torch's mechanism runs every operator again whose result was not kept,
needed or not, and keeps more than no checkpoint does.
"""

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torch_fp8.autograd.current_pass import is_traced

CASTS = (
    "amax",
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
"""Operators of torch_fp8 that return FP8, scales and statistics, and no 16-bit tensor."""
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
    """Contexts of the two passes, for ``checkpoint(..., use_reentrant=False, context_fn=...)``.

    Given as it is, not called: ``context_fn=torch_fp8.selective_checkpoint_contexts``; likewise in
    Hugging Face's ``gradient_checkpointing_kwargs``. The model is compiled. Gradients are those
    without checkpointing, bit for bit.

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
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return contexts


def _policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operator_name(func) in CASTS or operator_name(func) in ATTENTION
    for place, argument in enumerate(func._schema.arguments if is_kept else ()):
        if argument.name == "columnwise":  # False: a weight's, or of a frozen layer
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            is_kept = given is not False
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def operator_name(func: Any) -> str:
    """Names carry no overload; only torch's and our operators have one."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "torch_fp8"):
        return ""
    return func._schema.name.rpartition("::")[2]
