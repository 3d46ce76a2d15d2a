"""Hooks that keep the values between a sharded model's layers in float32, as in ``bf16-mixed``.

FSDP2 gathers all weights of a block in BF16. Linear layers are autocast anyway, but an embedding's
output has the weight's dtype. The residual stream would have it, too, and its sums would lose bits.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.optim.embedding_dtype import keep_output_dtype


class WeightsDtype:
    """A hook before torch's norms, which on the CPU reject a float32 input with a BF16 weight.

    On CUDA autocast casts the weight up instead.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dtype != torch.bfloat16:
            return args
        if not args or not isinstance(args[0], Tensor) or args[0].device.type != "cpu":
            return args
        return (args[0].to(torch.bfloat16), *args[1:])


def keep_stream(model: nn.Module) -> None:
    """Add hooks to embeddings and norms; a repeated call changes nothing."""
    release_stream(model)
    keep_output_dtype(model, set(model.parameters()))
    for module in model.modules():
        # running_mean: batch and instance norms, whose common base class is not public in torch.
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm)) or hasattr(module, "running_mean"):
            module.register_forward_pre_hook(WeightsDtype())


def release_stream(model: nn.Module) -> None:
    """Remove the hooks on norms; `torch_fp8.revert` removes those on embeddings."""
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, WeightsDtype)]:
            del hooks[key]
