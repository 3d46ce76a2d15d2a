"""`TrialReads`: the attributes that a module's own code read when a trial recognized the module.

Conversion recognizes norms, linear layers, activations and gated experts by running their own code
on a twin that notes what it reads (`Recorder`). What the trial has shown holds for these values. A
converted module compares them at each forward, and runs its own code as soon as one has changed.

Only constants can be compared: numbers, strings, dtypes, functions, and tuples of these. The twin
refuses code that reads a missing attribute or writes one, and code that reads anything else, such
as a list or a configuration, has no `TrialReads`. Conversion leaves such modules alone.
"""

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_fp8.autograd.current_pass import warn_once
from torch_fp8.nn.class_swap import user_class

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONSTANTS = (
    *(int, float, str, torch.dtype, torch.device, types.NoneType),
    *(types.FunctionType, types.BuiltinFunctionType, property),
)


class Absent:
    """Value of an attribute that a module itself does not have, because its class has it."""


class TrialReads:
    """Values that a module's own code read, to compare before each use of what a trial has shown.

    Args:
        cls: the user's class of the module.
        own: values by name, or `Absent` if the class has the attribute.
        children: the same for the children that the code called, by name. They have no hooks.
    """

    def __init__(
        self, cls: type, own: Mapping[str, Any], children: Mapping[str, "TrialReads"]
    ) -> None:
        self.cls, self.own, self.children = cls, tuple(own.items()), tuple(children.items())
        names = [name for name, value in self.own if value is Absent]
        self.of_class = tuple([(name, getattr(cls, name, Absent)) for name in names])

    def change(self, module: nn.Module) -> str | None:
        """Return what has changed since the trial, in words that follow "its attribute", or None.

        Args:
            module: module with which the trial was made, or one of the same class.
        """
        now = module.__dict__
        for name, value in self.own:
            current = now.get(name, Absent)
            # An equal number may be another object, after pickling or an assignment.
            if current is not value and (type(current) is not type(value) or current != value):
                return f"'{name}' has changed"
        for name, value in self.of_class:
            if getattr(self.cls, name, Absent) is not value:
                return f"'{name}' has changed"
        for name, reads in self.children:
            child: Any = getattr(module, name, None)
            if type(child) is not reads.cls:
                return f"'{name}' has changed"
            for hooks in _HOOKS:
                if child.__dict__[hooks]:
                    return f"'{name}' has got hooks"
            change = reads.change(child)
            if change is not None:
                return f"'{name}' has changed: {change}"
        return None

    def hold(self, module: nn.Module, name: str) -> bool:
        """Return whether nothing has changed since the trial; warn of the first change of a kind.

        Args:
            module: see `change`.
            name: qualified name of the module.
        """
        change = self.change(module)
        if change is not None:
            _note_change(name, change)
        return change is None

    def __reduce__(self) -> Any:  # without `of_class`: properties cannot be pickled
        return TrialReads, (self.cls, dict(self.own), dict(self.children))


class Found(NamedTuple):
    """The formula of a module, and what its forward read in the trials that show it."""

    spec: Any
    reads: TrialReads


class Recorder:
    """A twin of a module that notes the names that the module's own code reads.

    Args:
        module: module without own children, buffers and parameters apart from those in `given`.
        given: attributes of the twin that the caller varies or supplies; they are not noted. The
            `Recorder` of a child puts the child's twin there.

    Attributes:
        twin: the twin; its calls run no hooks.
    """

    def __init__(self, module: nn.Module, given: Mapping[str, Any]) -> None:
        self.cls = user_class(type(module))
        self._given = dict(given)
        self._own = {n: v for n, v in vars(module).items() if n != "forward"}
        self._names: set[str] = set()
        twins = {k: v.twin if isinstance(v, Recorder) else v for k, v in given.items()}
        cls = _recording(self.cls, self._names)
        self.twin: Any = cls.__new__(cls)
        # Without the children, whose hooks would run.
        object.__setattr__(self.twin, "__dict__", {**self._own, "_modules": {}, **twins})

    def give(self, name: str, value: Any) -> None:
        """Set one of the attributes that are not noted."""
        self._given[name] = value
        object.__getattribute__(self.twin, "__dict__")[name] = value

    def found(self, spec: Any) -> Found | None:
        """Return a formula that the trials show, or None if what they read cannot be compared."""
        reads = self.reads()
        return None if reads is None else Found(spec, reads)

    def reads(self) -> TrialReads | None:
        """Return what the code has read, or None if a value among it cannot be compared."""
        names = self._names - {"__class__"}
        of_given = {n: r for n, r in self._given.items() if n in names and isinstance(r, Recorder)}
        children: Any = {name: recorder.reads() for name, recorder in of_given.items()}
        own = {name: self._own.get(name, Absent) for name in sorted(names - self._given.keys())}
        values = [getattr(self.cls, n, Absent) if v is Absent else v for n, v in own.items()]
        if None in children.values() or not all(map(is_constant, values)):
            return None
        return TrialReads(self.cls, own, children)


def is_constant(value: Any) -> bool:
    """Return whether a value cannot change without becoming another object."""
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    return isinstance(value, _CONSTANTS)


@torch.inference_mode(False)  # also enables gradients
def computes_alike(function: Any, other: Any) -> bool:
    """Return whether two functions of one float32 tensor agree, at all magnitudes and in gradients.

    Args:
        function, other: functions from (R, C) to a tensor of any shape, equal for both.
    """
    near = torch.linspace(-12, 12, 25, device="cpu", dtype=torch.float32)
    far = 10 ** torch.arange(-6, 9, device="cpu", dtype=torch.float32)  # beyond any model's clamps
    steps = torch.cat([near, far, -far])
    pairs = torch.cartesian_prod(steps, steps).reshape(len(steps), -1)  # R values with each other
    results = []
    for each in (function, other):
        x = pairs.clone().requires_grad_()
        with torch.autocast("cpu", enabled=False):
            y = each(x)
        if not y.requires_grad:
            return False
        (grad,) = torch.autograd.grad(y.sum(), x)
        results.append((y.detach(), grad))
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(*results, strict=True)
    )


def _recording(cls: Any, names: set[str]) -> Any:
    """Return a subclass that adds each name that is read to `names`, and refuses the rest."""
    if cls.__call__ is not nn.Module.__call__ or cls.__getattr__ is not nn.Module.__getattr__:
        raise NotImplementedError

    def read(self: Any, name: str) -> Any:
        names.add(name)
        return cls.__getattribute__(self, name)

    def refuse(self: Any, *_: Any) -> Any:
        raise NotImplementedError  # not AttributeError, which getattr and hasattr catch

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    methods: dict[str, Any] = {"__getattribute__": read, "__call__": call}
    methods |= dict.fromkeys(("__getattr__", "__setattr__", "__delattr__"), refuse)
    return type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, **methods})


@torch.compiler.assume_constant_result
def _note_change(name: str, change: str) -> bool:
    warn_once(
        f"FP8: '{name}' is not fused any more, because its attribute {change} since the "
        "conversion. Its own code runs, which is right but slower. If it is to stay so, call "
        "torch_fp8.convert_to_float8(model) again, which tries to fuse it as it is now"
    )
    return True
