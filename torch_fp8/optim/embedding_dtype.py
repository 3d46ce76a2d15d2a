"""Layers in high precision go on to compute in the user's dtype when their weight becomes BF16.

Autocast casts what enters a linear layer, but not what an embedding looks up: that has the weight's
dtype. With a float32 weight the residual stream of a transformer is float32 under ``bf16-mixed``;
with the BF16 weight of a split master it would be BF16, at the price of 0.9 % of the evaluation
loss after 3,000 steps (benchmarks/results/optimizer_loss.csv, "residual stream in BF16"). So a hook
casts the output.

Under autocast a linear layer (the output layer, say) multiplies in BF16. A hook gives it the BF16
half of a `SplitWeight` (`torch_fp8.tensor.split_weight`), so that nothing is joined and cast.

Not under FSDP2 with a policy that computes in BF16: there the stream is BF16 with stock weights,
too.
"""

import contextlib
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.autograd.current_pass import in_high_precision
from torch_fp8.tensor.split_weight import SplitWeight, stored
from torch_fp8.tensor.weight_half import half

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_HIDES_IN_GRAPHS = torch.__version__ >= "2.12"
"""Whether Dynamo traces how `WholeWeight` ends what `HalfWeight` began. Where it breaks the graph
instead, compiled code joins the halves of the weight, and autocast rounds them.
"""


class _Hook:
    """A hook of ours.

    Attributes:
        handle: torch's handle, which removes it.
    """

    handle: Any


class Float32Output(_Hook):
    """A forward hook that turns an output in the weight's BF16 into float32; no-op for other
    weights.
    """

    paused = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.paused or not isinstance(output, Tensor) or output.dtype != torch.bfloat16:
            return output
        return output.float() if _is_narrow(module) else output


class HalfWeight(_Hook):
    """A forward pre-hook that lets a module multiply by, or look up, the BF16 half of its weight.

    Not outside autocast, where stock would multiply float32, nor within
    `torch_fp8.high_precision`, in transforms of torch.func and in traces for programs without us.
    """

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        weight = module._parameters.get("weight")
        if not isinstance(weight, SplitWeight) or getattr(module, "runs_fp8", False):
            return
        if in_high_precision() or (torch.compiler.is_compiling() and not _HIDES_IN_GRAPHS):
            return
        if isinstance(module, _EMBEDDINGS) or torch.is_autocast_enabled(weight.device.type):
            # The attribute hides the Parameter of this name, which stays where it is.
            module.__dict__["weight"] = half(weight)


class WholeWeight(_Hook):
    """A forward hook that ends what `HalfWeight` began, also where the forward raised."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if "weight" in module.__dict__:
            del module.__dict__["weight"]


def multiply_half(linear: nn.Module) -> None:
    """Let a linear layer in high precision multiply by the BF16 half under autocast."""
    if not _hooks(linear):
        _use_half(linear)


def _use_half(module: nn.Module) -> None:
    before, after = HalfWeight(), WholeWeight()
    before.handle = module.register_forward_pre_hook(before, with_kwargs=True)
    after.handle = module.register_forward_hook(after, always_call=True)


def keep_output_dtype(model: nn.Module, split: Container[Tensor]) -> int:
    """Let the embeddings of `model` whose weights are among `split` return float32.

    Returns:
        The number of embeddings that do so from now on, and did not before.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, _EMBEDDINGS) and module.weight in split and not _hooks(module):
            _use_half(module)
            output = Float32Output()
            output.handle = module.register_forward_hook(output)
            count += 1
    return count


@contextlib.contextmanager
def bf16_stream(model: nn.Module) -> Iterator[None]:
    """Let embeddings with BF16 weights return BF16, within.

    A cache that is made in the dtype of the model's first weight takes keys of that dtype alone.
    """
    hooks = [h for m in model.modules() for h in m._forward_hooks.values()]
    paused = [hook for hook in hooks if isinstance(hook, Float32Output)]
    for hook in paused:
        hook.paused = True
    try:
        yield
    finally:
        for hook in paused:
            hook.paused = False


def restore_output_dtype(model: nn.Module) -> None:
    """Remove the hooks where the weight is no longer BF16."""
    for module in model.modules():
        for hook in () if _is_narrow(module) else _hooks(module):
            hook.handle.remove()


def _is_narrow(module: nn.Module) -> bool:
    """Return whether the weight is BF16 in memory."""
    weight: Any = module._parameters.get("weight")
    return isinstance(weight, Tensor) and stored(weight).dtype == torch.bfloat16


def _hooks(module: nn.Module) -> list[_Hook]:
    """Return our hooks of a module."""
    registered = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [hook for hook in registered if isinstance(hook, _Hook)]
