"""Checks in an optimizer's first steps: bypassed or replaced layers, and untrainable weights.

Code bypasses a layer by ``F.linear(x, layer.weight)``. Such a product runs in the dtype of its
operands, while the summary counts the layer as FP8. The sign is a gradient for a layer that was
never called. It leads to a warning, except in graphs of torch.compile, which do not call layers.

Other libraries replace modules of a converted model by their own (torchao's QAT, bitsandbytes), or
a user gives it a new head. The new layer runs as its library made it, while the summary counts the
old one, so this leads to a warning, too. The base layer below an adapter is still there.

Weights that `torch_fp8.freeze` stores as FP8 only never get a gradient, so an optimizer would
silently skip them. Converting the optimizer raises an error, and so does the first step of an
optimizer that is not converted. The frozen base below adapters is not a mistake, because
``AdamW(model.parameters())`` contains it and trains the adapters.
"""

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_fp8.autograd.current_pass import ran_in_graph
from torch_fp8.nn.class_swap import own_child
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.ops.one_rank import in_several_ranks
from torch_fp8.quantization.wording import counted, first_of
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.exchange import stored_grad
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight
from torch_fp8.tensor.released_grad import is_released

_Layers = dict[str, "weakref.ref[nn.Module]"]
"""A model's FP8 layers by qualified name."""
_MOST_LOOKS = 10
"""Largest number of steps in which an optimizer's gradients are checked."""

_frozen: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_checked: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""Optimizers that have no frozen weight of the models in `_frozen`."""
_models: "weakref.WeakKeyDictionary[nn.Module, _Layers]" = weakref.WeakKeyDictionary()
"""Watched models, with the layers of their last conversion."""
_looks: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()
_read: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()
"""Suspect layers in a job of several ranks; True if this rank's own backward made the gradient."""


def watch_first_steps(model: nn.Module) -> None:
    """Make optimizers check, in their first steps, for FP8 layers bypassed or replaced since."""
    _models[model] = {
        name: weakref.ref(module)
        for name, module in model.named_modules()
        if isinstance(module, FrozenStorage)
    }
    _watch()


def guard(model: nn.Module) -> None:
    """Make optimizers with frozen weights of `model` raise ValueError from now on."""
    _frozen.add(model)
    _checked.clear()
    _watch()


@functools.cache
def _watch() -> None:
    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if optimizer not in _checked:
            refuse_training(optimizer)
            _checked.add(optimizer)
        if _looks.get(optimizer, 0) < _MOST_LOOKS:
            _look(optimizer)

    register_optimizer_step_pre_hook(look)


def refuse_training(optimizer: Optimizer) -> None:
    """Raise ValueError if `optimizer` has a frozen weight of a guarded model."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for model in _frozen:
        if any(own_child(module, "base_layer") is not None for module in model.modules()):
            continue
        for name, parameter in model.named_parameters():
            if parameter in held and isinstance(local(parameter), Float8FrozenWeight):
                raise ValueError(
                    f"{type(optimizer).__name__} has '{name}' of {type(model).__name__}, which "
                    "torch_fp8.freeze stores in FP8 only, so it cannot be trained. Call "
                    "torch_fp8.thaw(model) before you make the optimizer, or give it only the "
                    "parameters that require gradients"
                )


def _look(optimizer: Optimizer) -> None:
    _looks[optimizer] = _looks.get(optimizer, 0) + 1
    for model in list(_models):
        _warn_of_replaced(model)
    layers = _layers_with_gradients(optimizer)
    suspects = [layer for layer in layers if not layer.fp8.called]
    if layers and not suspects:
        _looks[optimizer] = _MOST_LOOKS
    suspects = [layer for layer in suspects if _is_of_this_rank(layer)]
    if not suspects or ran_in_graph():
        return
    others = {m for model in _models for m in model.modules()} - set(suspects)
    tied = {p for module in others for p in module.parameters(recurse=False)}
    weights = {layer.fp8.name: layer.weight for layer in suspects if layer.weight not in tied}
    names = [name for name, weight in weights.items() if _has_gradient(weight)]
    if not names:  # zero gradients, with which torch.distributed.checkpoint initializes states
        return
    _looks[optimizer] = _MOST_LOOKS
    for layer in suspects:
        layer.fp8.called = True  # so that another optimizer does not warn again
    warnings.warn(
        f"FP8: {counted(len(names), 'converted layer')} ({first_of(names)}) got a gradient, but "
        "the layer was never called in this process: your code multiplies by its weight directly, "
        "as F.linear(x, layer.weight) does. That product is not in FP8, though the summary counts "
        f"it. Call the layer, or keep it in high precision with FP8Config(skip=({names[0]!r},))",
        stacklevel=3,
    )


def _warn_of_replaced(model: nn.Module) -> None:
    """Warn once about modules that have replaced FP8 layers and do not run in FP8."""
    present = dict(model.named_modules(remove_duplicate=False))
    replaced = {}
    for name, reference in _models[model].items():
        module = present.get(name)
        if module is None or module is reference():
            continue
        in_fp8 = any(isinstance(part, FrozenStorage) for part in module.modules())
        if not in_fp8 and any(parameter.ndim >= 2 for parameter in module.parameters()):
            replaced[name] = f"{type(module).__module__}.{type(module).__qualname__}"
    if not replaced:
        return
    _models[model] = {}
    warnings.warn(
        f"FP8: {counted(len(replaced), 'converted layer')} ({first_of(list(replaced))}) of "
        f"{type(model).__name__} left FP8 after the conversion, though the summary counts them: "
        f"modules of {first_of(sorted(set(replaced.values())))} took their places. "
        "Replace modules before you convert the model; those that another library quantizes stay "
        f"as they are, and FP8Config(skip=({next(iter(replaced))!r},)) names them explicitly",
        stacklevel=4,
    )


def _layers_with_gradients(optimizer: Optimizer) -> list[Float8Layer]:
    """Return the layers of watched models whose weights the optimizer is about to step."""
    parameters = {p for group in optimizer.param_groups for p in group["params"]}
    layers = {m for model in _models for m in model.modules() if isinstance(m, Float8Layer)}
    return [
        layer
        for layer in sorted(layers, key=lambda layer: layer.fp8.name)
        if layer.fp8.config.backend == "torch"
        and layer.weight in parameters
        and layer.weight.requires_grad  # one that was frozen has its last gradient
        and stored_grad(layer.weight) is not None
    ]


def _is_of_this_rank(layer: Float8Layer) -> bool:
    """Return whether this rank computes the layer's gradient, which DDP may average from others.

    All ranks use sharded weights alike. For other weights a hook notes it in the next backward.
    """
    if not in_several_ranks() or isinstance(layer.weight, DTensor):
        return True
    if layer not in _read:
        _read[layer], reference = False, weakref.ref(layer)

        def note(weight: Tensor) -> None:
            owner = reference()
            if owner is not None:
                _read[owner] = True

        layer.weight.register_post_accumulate_grad_hook(note)
    return _read[layer]


def _has_gradient(weight: Tensor) -> bool:
    """Return whether a weight's gradient is non-zero, or was released."""
    grad = stored_grad(weight)
    if grad is None or is_released(weight):
        return grad is not None
    grad = local(grad)
    return not grad.is_meta and bool(torch.count_nonzero(grad))
