"""Operations on `LazyLogits` that leave them uncomputed, before `torch_fp8.nn.logit_losses`.

Programs cast logits, shift and flatten their tokens, move the classes, multiply by a factor or
apply a softcap. Each of these is done to the hidden states of the rows instead, or recorded. A meta
tensor goes through the same steps, so that shapes, strides, dtypes and errors are torch's.

Legend: H hidden features, V classes.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.nn.lazy_logits import STEPS, LazyLogits, Recorded, empty_meta
from torch_fp8.nn.logit_losses import LOG_SOFTMAX, autocasts, cross_entropy
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.split_weight import stored

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def logits_of(recorded: Recorded) -> LazyLogits:
    """Return uncomputed logits; importing this also registers the steps of this file."""
    return LazyLogits.of(recorded)


def _record(
    x: LazyLogits,
    step: tuple[Any, tuple[Any, ...], dict[str, Any]],
    shape_of: Tensor,
    hidden: Tensor | None = None,
    class_dim: int | None = None,
    scales: tuple[float | None, ...] = (),
    is_detached: bool = False,
) -> LazyLogits:
    """Return the logits after a step; arguments as in `Recorded`, those left out as in `x`."""
    of = x.recorded
    recorded = Recorded(
        of.call,
        of.hidden if hidden is None else hidden,
        shape_of,
        of.class_dim if class_dim is None else class_dim,
        x,
        step,
        (*of.scales, *scales),
        is_detached or of.is_detached,
    )
    return x.of(recorded)


def _on_meta(func: Any, x: Tensor, args: Any, options: Any) -> Any:
    """Return the result of a function for an empty meta tensor, outside all modes."""
    if torch.compiler.is_compiling():
        return func(x, *args, **options)
    with _disable_current_modes():
        return func(x, *args, **options)


def _reshape(func: Any, x: LazyLogits, *args: Any, **options: Any) -> Any:
    """Reshape in row-major order; V must stay the last dimension."""
    of = x.recorded
    shape_of = _on_meta(func, of.shape_of, args, options)
    classes = of.shape_of.shape[of.class_dim]
    is_last = of.class_dim == of.shape_of.ndim - 1 and shape_of.shape[-1:] == (classes,)
    if not is_last or shape_of.dtype != of.shape_of.dtype:
        return NotImplemented
    rows = of.hidden.reshape(*shape_of.shape[:-1], of.hidden.shape[-1])
    return _record(x, (func, args, options), shape_of, rows, shape_of.ndim - 1)


def _reshape_as(func: Any, x: LazyLogits, other: Tensor) -> Any:
    return _reshape(func, x, empty_meta(other.shape, x.dtype))


def _permute(func: Any, x: LazyLogits, *args: Any, **options: Any) -> Any:
    of = x.recorded
    shape_of = _on_meta(func, of.shape_of, args, options)
    sizes = [1] * of.shape_of.ndim
    sizes[of.class_dim] = 2
    marked = _on_meta(func, empty_meta(sizes, torch.int8), args, options)
    hidden = func(of.hidden, *args, **options)
    return _record(x, (func, args, options), shape_of, hidden, list(marked.shape).index(2))


def _copy(func: Any, x: LazyLogits, *args: Any, **options: Any) -> Any:
    return _record(x, (func, args, options), _on_meta(func, x.recorded.shape_of, args, options))


def _detach(func: Any, x: LazyLogits) -> Any:
    if torch.compiler.is_compiling():  # logits that the program keeps leave the graph
        return NotImplemented
    of = x.recorded
    return _record(x, (func, (), {}), of.shape_of, of.hidden.detach(), is_detached=True)


def _cast(func: Any, x: LazyLogits, *args: Any, **options: Any) -> Any:
    """Cast to another dtype of floats on the same device."""
    given = [*args, *options.values()]
    for value in given:
        if isinstance(value, Tensor):
            device: Any = value.device
        elif isinstance(value, (str, int, torch.device)) and not isinstance(value, bool):
            device = torch.device(value)
        else:
            continue
        if device.type != x.device.type or device.index not in (None, x.device.index):
            return NotImplemented
    dtypes = [v.dtype if isinstance(v, Tensor) else v for v in given]
    dtype = next((d for d in dtypes if isinstance(d, torch.dtype)), _METHODS.get(func, x.dtype))
    if dtype not in _FLOATS or any(isinstance(v, torch.memory_format) for v in given):
        return NotImplemented
    if dtype == x.dtype and True not in given:  # no copy requested
        return x
    shape_of = _on_meta(Tensor.to, x.recorded.shape_of, (dtype,), {})
    return _record(x, (func, args, options), shape_of)


_METHODS = {
    Tensor.float: torch.float32,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.half: torch.float16,
}


def _scale(func: Any, x: LazyLogits, *args: Any, **options: Any) -> Any:
    """Multiply or divide by a number."""
    if len(args) != 1 or options or type(args[0]) not in (int, float) or not args[0]:
        return NotImplemented
    number = float(args[0])
    scale = 1 / number if func in _DIVISIONS else number
    shape_of = x.recorded.shape_of.contiguous()
    return _record(x, (func, args, options), shape_of, scales=(scale,))


_DIVISIONS = (Tensor.div, Tensor.__truediv__, Tensor.true_divide, torch.div, torch.true_divide)


def _tanh(func: Any, x: LazyLogits) -> Any:
    return _record(x, (func, (), {}), x.recorded.shape_of.contiguous(), scales=(None,))


def _mean(func: Any, x: LazyLogits, *args: Any, **options: Any) -> Any:
    """Average detached logits, which trainers log: the average row times the average weight."""
    if args or options:
        return NotImplemented
    of, call = x.recorded, x.recorded.call
    linear = None not in of.scales and math.inf not in of.scales
    if not (of.is_detached and linear and of.hidden.numel()) or isinstance(
        call.weight, QuantizableTensor
    ):
        return NotImplemented
    with torch.no_grad(), call.present():
        weight, bias = call.parameters(False)
        row = of.hidden.movedim(of.class_dim, -1).flatten(0, -2).mean(0, dtype=torch.float32)
        mean = row @ stored(weight).mean(0, dtype=torch.float32)
        mean = mean if bias is None else mean + bias.float().mean()
    return (mean * math.prod(s for s in of.scales if s is not None)).to(x.dtype)


def _log_softmax(
    func: Any, x: LazyLogits, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
) -> Any:
    """Take the logarithm of softmax, for a following ``F.nll_loss``."""
    is_class_dim = isinstance(dim, int) and dim % x.ndim == x.recorded.class_dim
    if not is_class_dim or LOG_SOFTMAX in x.recorded.scales:
        return NotImplemented
    dtype = dtype or _log_dtype(x)
    shape_of = empty_meta(x.shape, dtype)
    return _record(
        x, (torch.log_softmax, (dim,), {"dtype": dtype}), shape_of, scales=(LOG_SOFTMAX,)
    )


def _log_dtype(x: LazyLogits) -> torch.dtype:
    """Return the dtype of a log_softmax, which under autocast depends on the device."""
    if not autocasts(x):
        return x.dtype
    if torch.compiler.is_compiling():
        return x.recorded.hidden.new_zeros(1, dtype=x.dtype).log_softmax(0).dtype
    return _autocast_log_dtype(x.device.type, x.dtype)


@functools.cache
def _autocast_log_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    with _disable_current_modes(), torch.autocast(device):
        return torch.zeros(1, dtype=dtype, device=device).log_softmax(0).dtype


def _index(func: Any, x: LazyLogits, index: Any) -> Any:
    """Take some rows; the index may not reach the last dimension, V."""
    of = x.recorded
    items = index if isinstance(index, tuple) else (index,)
    if of.class_dim != x.ndim - 1 or any(isinstance(item, (list, LazyLogits)) for item in items):
        return NotImplemented
    if any(item is Ellipsis for item in items):
        if items[-1] is Ellipsis:
            items = items[:-1]
        elif isinstance(items[-1], slice) and items[-1] == slice(None):
            items = items[:-1]  # all classes
        else:
            return NotImplemented
    elif len(items) and isinstance(items[-1], slice) and items[-1] == slice(None):
        items = items[:-1]
    if torch.compiler.is_compiling() and any(map(_is_mask, items)):
        return NotImplemented  # the number of rows is unknown
    if sum(_num_dims(item) for item in items) >= x.ndim:
        return NotImplemented
    rows = of.hidden[index]
    sizes = *rows.shape[:-1], x.shape[-1]
    if any(isinstance(item, Tensor) for item in items):
        shape_of = empty_meta(sizes, x.dtype)
    else:
        shape_of = _on_meta(func, of.shape_of, (index,), {})
    assert shape_of.shape == sizes
    return _record(x, (func, (index,), {}), shape_of, rows, shape_of.ndim - 1)


def _num_dims(item: Any) -> int:
    """Return the number of dimensions that an item of an index consumes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_mask(item) else 1


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _register_hook(func: Any, x: LazyLogits, hook: Any) -> Any:
    """Keep the hooks of FSDP2 and Fabric, which only need to know that a backward begins."""
    module = getattr(getattr(hook, "func", hook), "__module__", None)  # Fabric's is a partial
    if not str(module).startswith(_WATCHING):
        return NotImplemented
    x.recorded.call.begins.append(hook)
    with torch._C.DisableTorchFunctionSubclass():
        return func(x, hook)


_WATCHING = ("torch.distributed.fsdp.", "lightning.fabric.", "lightning_fabric.")
"""Packages whose hooks on outputs do not look at the gradient."""


def _all(functions: tuple[str, ...]) -> list[Any]:
    """Return the functions and methods of these names."""
    return [getattr(owner, n) for n in functions for owner in (torch, Tensor) if hasattr(owner, n)]


_TABLE: tuple[tuple[Any, list[Any]], ...] = (
    (_reshape, _all(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"))),
    (_reshape_as, [Tensor.view_as, Tensor.reshape_as]),
    (_permute, _all(("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"))),
    (_permute, [Tensor.mT.__get__]),
    (_copy, [Tensor.contiguous, Tensor.clone, torch.clone]),
    (_detach, [Tensor.detach, torch.detach, Tensor.data.__get__]),
    (_cast, [Tensor.to, Tensor.type, Tensor.type_as, *_METHODS]),
    (_scale, _all(("mul", "multiply", "div", "true_divide"))),
    (_scale, [Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__]),
    (_mean, [Tensor.mean, torch.mean]),
    (_tanh, [torch.tanh, Tensor.tanh, F.tanh]),
    (_index, [Tensor.__getitem__]),
    (_register_hook, [Tensor.register_hook]),
    (_log_softmax, [F.log_softmax, torch.log_softmax, Tensor.log_softmax]),
    (cross_entropy, [F.cross_entropy, F.nll_loss]),
)
STEPS.update((function, step) for step, functions in _TABLE for function in functions)
