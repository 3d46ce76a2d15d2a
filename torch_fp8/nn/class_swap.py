"""Swapping the class of an existing module in place, and undoing it; names without wrappers.

The new class derives from a mixin and the module's own class, and has the latter's name, so that
``isinstance``, wrap policies and summaries work as before. The class that ``fully_shard`` puts in
front stays in front.
"""

import functools
from typing import Any

from torch import nn

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def without_compiler(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper; any other module unchanged."""
    return next(module.children()) if type(module).__name__ == "OptimizedModule" else module


def own_child(module: nn.Module, name: str) -> nn.Module | None:
    """Return a child or None; getattr would also find children that PEFT's wrappers forward to."""
    return dict(module.named_children()).get(name)


def add_mixin(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Put `mixin` in front of the module's class."""
    classes: Any = (type(module), mixin)
    module.__class__ = _mixed(*classes)


def remove_mixin(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Undo `add_mixin`."""
    classes: Any = (type(module), mixin)
    module.__class__ = _unmixed(*classes)


def rebase(cls: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """Return FSDP2's dynamic class ``(FSDPModule, X)`` with `base` in place of ``X``."""
    own = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    return type(f"FSDP{base.__name__}", (cls.__bases__[0], base), own)


def unwrapped_name(name: str) -> str:
    """Return a qualified name without the parts that compile and checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_fsdp_class(cls: type) -> bool:
    """Return whether ``fully_shard`` made this class."""
    return len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule"


def param_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's groups of parameters that are gathered together; one before torch 2.13."""
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (groups if groups is not None else [state._fsdp_param_group]) if g]


def stock_class(cls: type) -> type:
    """Return the class from which ``fully_shard`` made this one, or the class itself."""
    return cls.__bases__[1] if is_fsdp_class(cls) else cls


def user_class(cls: Any) -> Any:
    """Return the class that a module had before `add_mixin` and ``fully_shard``."""
    cls = stock_class(cls)
    while cls.__dict__.get("__reduce_ex__") is _reduce:
        cls = cls.__bases__[-1]
    return cls


@functools.cache
def _mixed(cls: Any, mixin: Any) -> Any:
    if issubclass(mixin, cls):  # the mixin already derives from this class
        return mixin
    if is_fsdp_class(cls):
        return rebase(cls, _mixed(cls.__bases__[1], mixin))
    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (mixin, cls), {**own, "__reduce_ex__": _reduce})


@functools.cache
def _unmixed(cls: Any, mixin: Any) -> Any:
    if is_fsdp_class(cls):
        return rebase(cls, _unmixed(cls.__bases__[1], mixin))
    assert mixin in (cls, cls.__bases__[0])
    return cls.__bases__[-1]


def _reduce(self: nn.Module, protocol: Any) -> Any:
    # A class made at run time cannot be imported: pickle its two bases.
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return _rebuild, type(self).__bases__, dict(state)


def _rebuild(mixin: Any, cls: Any) -> Any:
    mixed = _mixed(cls, mixin)
    return mixed.__new__(mixed)
