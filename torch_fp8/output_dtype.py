"""Embeddings keep the dtype of their output when their weight becomes BF16.

Autocast casts what enters a linear layer, but not what an embedding looks up: that has the weight's
dtype. With a float32 weight the residual stream of a transformer is float32 under ``bf16-mixed``;
with the BF16 weight of a split master it would be BF16, at the price of 0.9 % of the evaluation
loss after 3,000 steps (benchmarks/results/optimizer_loss.csv, "residual stream in BF16"). So a hook
casts the output.

Not under FSDP2 with a policy that computes in BF16: there the stream is BF16 with stock weights,
too.
"""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class Float32Output:
    """A forward hook: an output in the weight's BF16 becomes float32; a no-op for other weights."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        weight = module.weight
        if isinstance(output, Tensor) and weight.dtype == output.dtype == torch.bfloat16:
            return output.float()
        return output


def keep_output_dtype(model: nn.Module, split: Container[Tensor]) -> int:
    """Let the embeddings of `model` return float32 whose weights are among `split`.

    Returns:
        The number of embeddings that do so from now on, and did not before.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, _EMBEDDINGS) and module.weight in split and not _hooks(module):
            module.register_forward_hook(Float32Output())
            count += 1
    return count


def restore_output_dtype(model: nn.Module, *, everywhere: bool = False) -> None:
    """Undo `keep_output_dtype` where the weight is not BF16 any more, or `everywhere`."""
    for module in model.modules():
        for key in _hooks(module):
            if everywhere or module.weight.dtype != torch.bfloat16:
                del module._forward_hooks[key]


def _hooks(module: nn.Module) -> list[int]:
    return [key for key, hook in module._forward_hooks.items() if isinstance(hook, Float32Output)]
