"""Hooks that keep high-precision layers computing in the user's dtype after their weight is split.

Autocast casts the input of a linear layer, but not the output of an embedding, which has the
weight's dtype. With a float32 weight the residual stream of a transformer is float32 under
``bf16-mixed``. With the BF16 half of a split weight it would be BF16, which costs 0.9 % of the
evaluation loss after 3,000 steps (benchmarks/results/optimizer_loss.csv, "residual stream in
BF16"). So a hook casts the embedding's output to float32.

Under autocast a linear layer such as the output layer multiplies in BF16. A hook gives it the BF16
half of a `SplitWeight` (`torch_fp8.tensor.split_weight`), so the halves need not be joined and
cast.

No hook is used under FSDP2 with a policy that computes in BF16: stock weights give a BF16 stream
there, too.
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
_KEY = -1
"""Key of `WholeWeights` among the hooks of a module. torch.compile guards on the keys of hooks that
run even after an error, and torch's keys are different in each module, so that it would compile
equal blocks once each.
"""


class Hook:
    """Base of the hooks that `restore_output_dtype` removes.

    Attributes:
        handle: torch's handle, which removes the hook.
        hides_in_graphs: whether a hook that hides weights does so in compiled code, too.
    """

    handle: Any
    hides_in_graphs = True


class Float32Output(Hook):
    """A forward hook that casts a BF16 output to float32 if the weight is stored in BF16."""

    paused = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.paused or not isinstance(output, Tensor) or output.dtype != torch.bfloat16:
            return output
        weight: Any = module._parameters.get("weight")
        is_narrow = isinstance(weight, Tensor) and stored(weight).dtype == torch.bfloat16
        return output.float() if is_narrow else output


class HalfWeight(Hook):
    """A forward pre-hook that makes a module multiply by, or look up, the BF16 half of its weight.

    It does nothing outside autocast, where a stock layer would multiply in float32, within
    `torch_fp8.high_precision`, in torch.func transforms, and in traces for programs without this
    package. In a graph of torch 2.11, which it would break, it does nothing either: the halves of
    the weight are joined, and autocast rounds the result.
    """

    hides_in_graphs = torch.__version__ >= "2.12"

    def __call__(self, module: nn.Module, args: Any) -> None:
        weight = module._parameters.get("weight")
        if not isinstance(weight, SplitWeight) or getattr(module, "runs_fp8", False):
            return
        if in_high_precision() or (torch.compiler.is_compiling() and not self.hides_in_graphs):
            return
        if isinstance(module, _EMBEDDINGS) or torch.is_autocast_enabled(weight.device.type):
            # The attribute hides the Parameter of this name, which stays where it is.
            module.__dict__["weight"] = half(weight)


class WholeWeights(Hook):
    """A forward hook that shows hidden Parameters again, even if the forward raised an error.

    Args:
        in_graphs: whether any are hidden in compiled code.
    """

    def __init__(self, in_graphs: bool) -> None:
        self.in_graphs = in_graphs

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() and not self.in_graphs:
            return
        for name in module._parameters:
            module.__dict__.pop(name, None)


def hide_weights(module: nn.Module, before: Hook) -> bool:
    """Run `before`, which hides Parameters by attributes of their names, before each forward.

    Returns:
        False if the module has hooks of this kind already, and keeps these.
    """
    if _hooks(module):
        return False
    after = WholeWeights(before.hides_in_graphs)
    before.handle = module.register_forward_pre_hook(before)
    after.handle = handle = module.register_forward_hook(after, always_call=True)
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        registered: Any = reference()
        if handle.id in registered:
            registered[_KEY] = registered.pop(handle.id)
    handle.id = _KEY
    return True


def keep_output_dtype(model: nn.Module, split: Container[Tensor]) -> None:
    """Make the embeddings of `model` whose weights are in `split` return float32."""
    for module in model.modules():
        embeds = isinstance(module, _EMBEDDINGS) and module.weight in split
        if embeds and hide_weights(module, HalfWeight()):
            output = Float32Output()
            output.handle = module.register_forward_hook(output)


@contextlib.contextmanager
def bf16_stream(model: nn.Module) -> Iterator[None]:
    """Make embeddings with BF16 weights return BF16 in this context.

    A key-value cache created in the dtype of the model's first weight accepts only keys of that
    dtype.
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
    """Remove the hooks of this file from all modules of `model`."""
    for module in model.modules():
        for hook in _hooks(module):
            hook.handle.remove()


def _hooks(module: nn.Module) -> list[Hook]:
    """Return this module's hooks on a layer."""
    registered = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [hook for hook in registered if isinstance(hook, Hook)]
