"""`ConvertedOptimizer`: the common base of the classes that `convert_optimizer` swaps in."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_fp8.autograd.current_pass import RunsFP8
from torch_fp8.autograd.function import outside_inference_mode
from torch_fp8.config import FP8Config
from torch_fp8.ops.hardware import refuse_capture
from torch_fp8.optim.gradient_slot import attach_slots, slot_of
from torch_fp8.optim.residual import known_residual, loaded_residual, set_residual
from torch_fp8.optim.state import is_large
from torch_fp8.quantization.split_float import EXACT_BITS
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight
from torch_fp8.tensor.split_weight import SplitWeight, split_parameter

_OURS = ("fp8_", "_fp8_")
"""Beginnings of the names of attributes that copies of an optimizer have, too."""


class ConvertedOptimizer(Optimizer):
    """Base of converted optimizers. It has no ``__init__``, because only the class is swapped.

    Attributes:
        fp8_config: the configuration with which the optimizer was converted.
        fp8_layers: weak references to the layers whose weights get 8-bit gradients.
        fp8_why_bf16_gradients: the reason why no gradient is 8-bit at level O3, or None if some
            are.
        fp8_hooks_restored: the number of lost gradient hooks that were put back so far.
        fp8_released: the parameters stepped in backward since the last ``step``.
    """

    fp8_config: FP8Config
    fp8_layers: tuple["weakref.ref[RunsFP8]", ...] = ()
    fp8_why_bf16_gradients: str | None = None
    fp8_hooks_restored: int = 0
    fp8_released: set[Tensor]
    _fp8_base: type[Optimizer]

    def set_config(self, config: FP8Config) -> None:
        """Set the configuration."""
        self.fp8_config = config
        self.__dict__.setdefault("fp8_released", set())

    @property
    def fp8_gradients(self) -> set[Tensor]:
        """The current Parameters that get 8-bit gradients, including temporarily frozen ones."""
        layers = (layer for ref in self.fp8_layers if isinstance(layer := ref(), RunsFP8))
        weights = (w for layer in layers for w in layer.fp8_weights if is_large(w))
        return {w for w in weights if not isinstance(local(w), Float8FrozenWeight)}

    def has_fp8_gradient(self, parameter: Tensor) -> bool:
        """Return whether the gradient is quantized as soon as autograd has accumulated it."""
        slot = slot_of(parameter)  # a frozen weight has one, too
        return slot is not None and slot.quantize and parameter.requires_grad

    def indexed_parameters(self) -> list[tuple[int, dict[str, Any], Tensor]]:
        """Return (index, group, parameter) for each parameter; the index keys the rounding."""
        parameters = [(group, p) for group in self.param_groups for p in group["params"]]
        return [(i, group, parameter) for i, (group, parameter) in enumerate(parameters)]

    def step_of(self, index: int) -> int:
        """Return the step count of the parameter with an index, which also keys the rounding."""
        for group in self.param_groups:
            parameters = group["params"]
            if index < len(parameters):
                return int(self.state.get(parameters[index], {}).get("step", 0))
            index -= len(parameters)
        return 0

    def keeps_residual(self, parameter: Tensor) -> bool:
        """Return whether a step keeps the bits below BF16 of a BF16 parameter."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name.startswith(_OURS)}
        indexed = self.indexed_parameters()
        # Copying turns split weights into plain float32 and drops the residuals of BF16 weights.
        split = [i for i, _, p in indexed if isinstance(p, SplitWeight)]
        residuals = {i: known for i, _, p in indexed if (known := known_residual(p)) is not None}
        layers = [layer for ref in self.fp8_layers if (layer := ref())]
        ours = {"fp8_layers": layers, "fp8_split": split, "fp8_residuals": residuals}
        return {**super().__getstate__(), **own, **ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "fp8_layers" in state:  # load_state_dict calls this, too
            self.fp8_layers = tuple(map(weakref.ref, state["fp8_layers"]))
            split, residuals = self.__dict__.pop("fp8_split"), self.__dict__.pop("fp8_residuals")
            for i, _, parameter in self.indexed_parameters():
                if i in split and not isinstance(parameter, SplitWeight):
                    split_parameter(parameter, EXACT_BITS)
                if i in residuals:
                    stored, bits = residuals[i]
                    set_residual(parameter, loaded_residual(local(parameter), stored, bits))
        attach_slots(self)  # copied parameters have none, and indices may have changed

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is created at run time; pickle and deepcopy rebuild it from the two bases.
        return _rebuild, (type(self).__mro__[1], self._fp8_base), self.__getstate__()


def run_closure(optimizer: Any, closure: Callable[[], Any] | None) -> Any:
    """Run the closure, if any, with gradients enabled, and return the loss.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    refuse_capture(
        f"the step of {optimizer.__class__.__name__} in FP8",
        "capture forward and backward alone, and call optimizer.step() after each replay",
    )
    optimizer._opt_called = True  # schedulers check it
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@functools.cache
def converted_class(ours: Any, base: Any) -> type[ConvertedOptimizer]:
    """Return a subclass of `ours` and `base` that has the name of `base`.

    Frameworks log learning rates under the name of the class.
    """
    named = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    # If a compiled function calls step, the graph breaks there and the step runs eagerly.
    step: Any = torch.compiler.disable(outside_inference_mode(ours.step))
    step._wrapped_by_lr_sched = True  # schedulers need no wrapper: `run_closure` notes the call
    load = outside_inference_mode(ours.load_state_dict)
    # Python accepts a class if its first base has the layout of the old class, which may be that of
    # another base than Optimizer, such as ABC. Methods are still found in `ours` first.
    kind: Any = type(base)
    order = kind(base.__name__, (ours, base), {}).__mro__[1:]

    def mro(cls: Any) -> list[type]:
        is_subclass = cls.__bases__ != (base, ours)  # such as Lightning's wrapper
        return kind.mro(cls) if is_subclass else [cls, *order]

    meta: Any = type(kind.__name__, (kind,), {"mro": mro})
    return meta(base.__name__, (base, ours), {**named, "step": step, "load_state_dict": load})


def unhooked(method: Any) -> Any:
    """Return a ``step`` without the profiling wrapper that torch adds once per class."""
    return method.__wrapped__ if getattr(method, "hooked", False) else method


def _rebuild(ours: Any, base: Any) -> Any:
    cls: Any = converted_class(ours, base)
    return cls.__new__(cls)


def swap_class(optimizer: Optimizer, ours: type[ConvertedOptimizer]) -> None:
    """Change the optimizer's class, and remove a scheduler's wrapper around the old ``step``."""
    base: Any = type(optimizer)
    optimizer.__class__ = converted_class(ours, base)  # type: ignore[arg-type]
    optimizer.__dict__["_fp8_base"] = base
    # torch adds hooks and the profiler to step once per class; __setstate__ does so, too.
    Optimizer.__setstate__(optimizer, {})
    if hasattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched"):
        del optimizer.__dict__["step"]


_LIBRARIES = ("bitsandbytes", "torchao", "apex", "deepspeed", "transformer_engine")
"""Packages that have optimizers of the same names as torch's."""


def stock_name(optimizer: Optimizer) -> str:
    """Return the name of the optimizer's original class, with its library if it isn't torch."""
    base = optimizer._fp8_base if isinstance(optimizer, ConvertedOptimizer) else type(optimizer)
    library = base.__module__.partition(".")[0]
    return f"{base.__name__} of {library}" if library in _LIBRARIES else base.__name__
