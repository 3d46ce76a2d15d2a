"""Detection of gated MLPs, ``down(silu(gate(x)) * up(x))``, by tracing a module's own forward.

The forward runs once on symbols that record the operations. Any other operation on a symbol or on
the module raises, and the module is not a gated MLP. Names do not matter. gate and up are two
layers, or the halves (in either order) of the last dimension of one layer's output, by chunk, split
or slicing. What the forward reads beside its layers is in the result (`torch_fp8.nn.trial_reads`).
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.nn.class_swap import user_class
from torch_fp8.nn.gated_mlp import GatedMLPSpec
from torch_fp8.nn.trial_reads import Absent, Recorder, TrialReads, computes_alike


class FoundMLP(NamedTuple):
    """A gated MLP: the names of its layers, and what its forward read beside them."""

    spec: GatedMLPSpec
    reads: TrialReads


def find_gated_mlp(module: nn.Module, *, any_activation: bool = False) -> FoundMLP | None:
    """Return what a gated MLP consists of; None: the module computes anything else.

    Args:
        module: any module.
        any_activation: whether activations other than silu are accepted, such as GeGLU's.
    """
    children = dict(module.named_children())
    widths = {n: _width(child) for n, child in children.items() if _width(child)}
    if len(widths) not in (2, 3) or "forward" in module.__dict__:
        return None
    sizes = _sizes(module, widths)
    trial = _Trial(sizes, {n: functools.partial(_Called, n, widths.get(n, 0)) for n in children})
    x, cls = _Symbol(), user_class(type(module))
    try:
        output = cls.forward(trial, x)
        spec, activation = _matched(output, x)
    except Exception:  # the forward does something else with its layers
        return None
    if sorted((*spec.inputs, spec.down)) != sorted(widths):
        return None
    read = object.__getattribute__(trial, "names")
    own = {"forward": Absent, **{name: sizes[name] for name in sizes if name in read}}
    reads: dict[str, TrialReads] = {}
    if not any_activation:
        silu = None if activation.name is None else _silu_reads(children[activation.name])
        if type(activation) is not _Activated and silu is None:
            return None
        reads |= {} if silu is None else {activation.name: silu}
    return FoundMLP(spec, TrialReads(cls, own, reads))


class _Trial:
    """Stand-in for the module, which has its layers and sizes only, and notes the sizes it gives.

    Args:
        sizes: see `_sizes`.
        layers: functions that stand for the children.
    """

    def __init__(self, sizes: dict[str, int], layers: dict[str, Any]) -> None:
        object.__setattr__(self, "names", set())
        object.__setattr__(self, "attributes", {**sizes, **layers})

    def __getattribute__(self, name: str) -> Any:
        object.__getattribute__(self, "names").add(name)
        attributes = object.__getattribute__(self, "attributes")
        if name not in attributes:
            raise NotImplementedError  # not AttributeError, which getattr and hasattr catch
        return attributes[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotImplementedError


class _Symbol:
    """A symbolic value, which knows only how it was computed."""

    def __mul__(self, other: Any) -> "_Symbol":
        return _Product(self, other)

    def __rmul__(self, other: Any) -> "_Symbol":
        return _Product(other, self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _FUNCTIONS[func](*args, **(kwargs or {}))


class _Product(_Symbol):
    def __init__(self, left: Any, right: Any) -> None:
        self.factors = left, right


class _Activated(_Symbol):
    """The result of ``F.silu(x)``."""

    name: str | None = None
    """Child module that computes it; None: a function does."""

    def __init__(self, x: Any, inplace: bool) -> None:
        if inplace:
            raise NotImplementedError
        self.x = x


class _OtherActivated(_Activated):
    """The result of another activation function."""

    def __init__(self, x: Any, *options: Any, **named: Any) -> None:
        super().__init__(x, bool(named.get("inplace")))


class _Called(_Symbol):
    """The output of a child module; of a linear layer, (..., width)."""

    def __init__(self, name: str, width: int, x: Any) -> None:
        self.name, self.width, self.x = name, width, x

    @property
    def shape(self) -> "_Shape":
        return _Shape(self.width)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def chunk(self, chunks: int, dim: int = 0) -> tuple["_Half", "_Half"]:
        return self.split(self.width // chunks, dim)

    def split(self, split_size: Any, dim: int = 0) -> tuple["_Half", "_Half"]:
        half = self.width // 2
        if dim != -1 or split_size not in (half, [half, half], (half, half)):
            raise NotImplementedError
        return self[..., :half], self[..., half:]

    def __getitem__(self, index: Any) -> "_Half":
        ellipsis, columns = index
        half = self.width // 2
        start, stop, step = columns.indices(self.width)
        if ellipsis is not ... or step != 1 or half * 2 != self.width:
            raise NotImplementedError
        return _Half(self, [(0, half), (half, self.width)].index((start, stop)))


class _Half(_Symbol):
    """The first or the second half of the last dimension."""

    def __init__(self, whole: _Called, index: int) -> None:
        self.whole, self.index = whole, index


class _Shape:
    """A shape with a known last dimension only."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __getitem__(self, dim: Any) -> int:
        if dim != -1:
            raise NotImplementedError
        return self.width


_FUNCTIONS: dict[Any, Any] = {
    F.silu: _Activated,
    F.gelu: _OtherActivated,
    F.relu: _OtherActivated,
    torch.relu: _OtherActivated,
    torch.sigmoid: _OtherActivated,
    torch.tanh: _OtherActivated,
    torch.mul: _Product,
    torch.chunk: _Called.chunk,
    torch.split: _Called.split,
}


def _matched(output: Any, x: _Symbol) -> tuple[GatedMLPSpec, Any]:
    """Return the spec that computes `output` from `x`, and the activated value.

    AttributeError, TypeError: there is none.
    """
    product = output.x
    for activated, up in (product.factors, product.factors[::-1]):
        if not isinstance(activated, _Activated) and not _is_child(activated):
            continue
        gate = activated.x
        if isinstance(gate, _Half) and isinstance(up, _Half):
            if gate.whole is up.whole and gate.whole.x is x and gate.index != up.index:
                spec = GatedMLPSpec((gate.whole.name,), output.name, gate.index == 0)
                return spec, activated
        elif gate.x is x and up.x is x:
            return GatedMLPSpec((gate.name, up.name), output.name), activated
    raise NotImplementedError


def _width(child: nn.Module) -> int:
    """Return the output features of a linear layer, or of an adapter around one; 0: neither."""
    return max((m.out_features for m in child.modules() if isinstance(m, nn.Linear)), default=0)


def _sizes(module: nn.Module, widths: dict[str, int]) -> dict[str, int]:
    """Return the integer attributes by which forward may split a layer's output."""
    possible = {size for width in widths.values() for size in (width, width // 2)}
    return {k: v for k, v in vars(module).items() if type(v) is int and v in possible}


def _is_child(value: Any) -> bool:
    """Return whether a child that is no linear layer has computed a value."""
    return isinstance(value, _Called) and not value.width


def _silu_reads(activation: nn.Module) -> TrialReads | None:
    """Return what a module read that computes silu; None: it computes anything else."""
    try:
        recorder = Recorder(activation, {"training": True})
        with _disable_current_modes():
            for training in (True, False):
                recorder.give("training", training)
                if not computes_alike(recorder.twin, F.silu):
                    return None
    except Exception:
        return None
    return recorder.reads()
