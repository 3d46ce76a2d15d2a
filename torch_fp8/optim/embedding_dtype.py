"""Layers in high precision go on to compute in the user's dtype when their weight becomes BF16.

Autocast casts what enters a linear layer, but not what an embedding looks up: that has the weight's
dtype. With a float32 weight the residual stream of a transformer is float32 under ``bf16-mixed``;
with the BF16 weight of a split master it would be BF16, at the price of 0.9 % of the evaluation
loss after 3,000 steps (benchmarks/results/optimizer_loss.csv, "residual stream in BF16"). So a hook
casts the output.

A linear layer (the output layer, say) that runs where autocast is off multiplies float32 with
float32. With a BF16 weight it would raise: two hooks give it the weight in float32 meanwhile.

Other code may still read such a weight, and multiply it with float32 where autocast is off: the
error that torch raises then gets a line with the way out.

Not under FSDP2 with a policy that computes in BF16: there the stream is BF16 with stock weights,
too.
"""

import contextlib
import sys
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class Float32Output:
    """A forward hook that turns an output in the weight's BF16 into float32; no-op for other
    weights.
    """

    paused = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        weight = module.weight
        if self.paused:
            return output
        if isinstance(output, Tensor) and weight.dtype == output.dtype == torch.bfloat16:
            return output.float()
        return output


class WidenedWeight:
    """A forward pre-hook that widens a BF16 weight for a float32 input, outside autocast."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        input, weight = next(iter((*args, *kwargs.values())), None), module.weight
        if not isinstance(input, Tensor) or input.dtype != torch.float32:
            return
        if getattr(module, "runs_fp8", False):  # an FP8 layer that is not evaluated in FP8
            return
        if weight.dtype == torch.bfloat16 and not torch.is_autocast_enabled(input.device.type):
            # The attribute hides the Parameter of this name, which stays where it is.
            module.__dict__["weight"] = weight.float()


class NarrowedWeight:
    """A forward hook that ends what `WidenedWeight` began, also where the forward raised."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if "weight" in module.__dict__:  # torch 2.11 breaks a compiled graph here
            del module.__dict__["weight"]


class WayOut:
    """A forward hook that adds to an error of torch about BF16 next to another dtype."""

    note = (
        "\nFP8Config(opt_level='O2') and 'O3' make float32 weights of FP8 layers, embeddings and "
        "output layers BF16 (torch_fp8.optim.weight_owners). If other code than the layer's "
        "forward read one of them here, where autocast is off: FP8Config(skip=('name of the "
        "layer',)) keeps its weight as it is, and opt_level='O1' all of them"
    )

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is not None:
            return
        error = sys.exc_info()[1]
        if not isinstance(error, RuntimeError) or self.note in str(error):
            return
        if "dtype" in str(error) and any(name in str(error) for name in ("BFloat16", "bfloat16")):
            error.args = (f"{error}{self.note}",)


_HOOKS = (Float32Output, WidenedWeight, NarrowedWeight)


def name_the_way_out(model: nn.Module) -> None:
    """Let errors of `WayOut`'s kind have its note, as the model, or a child of it, raises them."""
    for module in (model, *model.children()):
        # torch's own containers read no weights of their children, or look at hooks.
        own = type(module).__module__.startswith("torch.nn.")
        if not own and not any(isinstance(hook, WayOut) for hook in module._forward_hooks.values()):
            module.register_forward_hook(WayOut(), always_call=True)


def keep_float32_products(linears: Iterable[nn.Module]) -> None:
    """Let linear layers in high precision multiply in float32 where autocast is off."""
    for module in linears:
        if not _hooks(module):
            module.register_forward_pre_hook(WidenedWeight(), with_kwargs=True)
            module.register_forward_hook(NarrowedWeight(), always_call=True)


def keep_output_dtype(model: nn.Module, split: Container[Tensor]) -> int:
    """Let the embeddings of `model` whose weights are among `split` return float32.

    Returns:
        The number of embeddings that do so from now on, and did not before.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, _EMBEDDINGS) and module.weight in split and not _hooks(module):
            module.register_forward_hook(Float32Output())
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


def restore_output_dtype(model: nn.Module, *, everywhere: bool = False) -> None:
    """Remove the hooks where the weight is no longer BF16, or `everywhere`."""
    for module in model.modules():
        for key in [k for k, hook in module._forward_hooks.items() if isinstance(hook, WayOut)]:
            del module._forward_hooks[key]
            module._forward_hooks_always_called.pop(key, None)
        for key, hooks in _hooks(module):
            if everywhere or module.weight.dtype != torch.bfloat16:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def _hooks(module: nn.Module) -> list[tuple[int, dict[int, Any]]]:
    """Return our hooks of a module: the key of each, and the dict that holds it."""
    registered: list[dict[int, Any]] = [module._forward_hooks, module._forward_pre_hooks]
    return [(key, of) for of in registered for key, hook in of.items() if isinstance(hook, _HOOKS)]
