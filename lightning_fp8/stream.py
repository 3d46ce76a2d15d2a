"""Hooks that keep the values between a sharded model's layers in float32, as in ``bf16-mixed``.

FSDP2 gathers all weights of a block in BF16. Linear layers are autocast anyway, but an embedding's
output has the weight's dtype. The residual stream would have it, too, and its sums would lose bits.
"""

from typing import Any

import torch
from torch import nn

from torch_fp8.optim.embedding_dtype import keep_output_dtype

_HANDLES = "_fp8_stream_handles"


class Float32Weights:
    """A forward pre-hook that gives a norm float32 copies of the BF16 weights that FSDP2 gathers.

    Batch and instance norms need weights in the dtype of their running statistics. On the CPU all
    norms refuse a float32 input with BF16 weights; on CUDA autocast casts those of the others.
    """

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dtype != torch.bfloat16:
                continue
            if parameter.device.type == "cpu" or hasattr(module, "running_mean"):
                # The attribute hides the Parameter of this name, which stays where it is.
                module.__dict__[name] = parameter.float()


class OwnWeights:
    """A forward hook that undoes `Float32Weights`.

    After a forward that raised an error the copies stay until the next one: with a hook that runs
    even then, torch.compile compiles equal blocks once each.
    """

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for name in module._parameters:
            module.__dict__.pop(name, None)


def keep_stream(model: nn.Module) -> None:
    """Add hooks to embeddings and norms; a repeated call changes nothing."""
    release_stream(model)
    keep_output_dtype(model, set(model.parameters()))
    for module in model.modules():
        # running_mean: batch and instance norms, whose common base class is not public in torch.
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm)) or hasattr(module, "running_mean"):
            vars(module)[_HANDLES] = (
                module.register_forward_pre_hook(Float32Weights()),
                module.register_forward_hook(OwnWeights()),
            )


def release_stream(model: nn.Module) -> None:
    """Remove the hooks on norms; `torch_fp8.revert` removes those on embeddings."""
    for module in model.modules():
        for handle in vars(module).pop(_HANDLES, ()):
            handle.remove()
            OwnWeights()(module, (), None)  # the last forward may have raised an error
