"""Detection of gated MLPs, ``down(silu(gate(x)) * up(x))``, by tracing a module's own forward.

The forward runs once on symbols that record the operations. Any other operation on a symbol or on
the module raises, and the module is not a gated MLP. Names do not matter. gate and up are two
layers, or the halves (in either order) of the last dimension of one layer's output, by chunk, split
or slicing.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.nn.gated_mlp import GatedMLPSpec


def gated_mlp_spec(module: nn.Module, *, any_activation: bool = False) -> GatedMLPSpec | None:
    """Return the names of a gated MLP's layers; None: the module computes anything else.

    Args:
        module: any module.
        any_activation: whether activations other than silu are accepted, such as GeGLU's.
    """
    children = dict(module.named_children())
    widths = {n: _width(child) for n, child in children.items() if _width(child)}
    if len(widths) not in (2, 3) or "forward" in module.__dict__:
        return None
    trial = SimpleNamespace(**_sizes(module, widths))
    for name in children:
        setattr(trial, name, functools.partial(_Called, name, widths.get(name, 0)))
    x = _Symbol()
    try:
        output = type(module).forward(trial, x)
        spec = _matched(output, x, children, any_activation)
    except Exception:  # the forward does something else with its layers
        return None
    names = () if spec is None else (*spec.inputs, spec.down)
    return spec if sorted(names) == sorted(widths) else None


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


def _matched(output: Any, x: _Symbol, children: dict[str, nn.Module], any_activation: bool) -> Any:
    """Return the spec that computes `output` from `x`; None or AttributeError: there is none."""
    product = output.x
    for activated, up in (product.factors, product.factors[::-1]):
        if not _is_activated(activated, children, any_activation):
            continue
        gate = activated.x
        if isinstance(gate, _Half) and isinstance(up, _Half):
            if gate.whole is up.whole and gate.whole.x is x and gate.index != up.index:
                return GatedMLPSpec((gate.whole.name,), output.name, gate.index == 0)
        elif gate.x is x and up.x is x:
            return GatedMLPSpec((gate.name, up.name), output.name)
    return None


def _width(child: nn.Module) -> int:
    """Return the output features of a linear layer, or of an adapter around one; 0: neither."""
    return max((m.out_features for m in child.modules() if isinstance(m, nn.Linear)), default=0)


def _sizes(module: nn.Module, widths: dict[str, int]) -> dict[str, int]:
    """Return the integer attributes by which forward may split a layer's output."""
    possible = {size for width in widths.values() for size in (width, width // 2)}
    return {k: v for k, v in vars(module).items() if type(v) is int and v in possible}


def _is_activated(value: Any, children: dict[str, nn.Module], any_activation: bool) -> bool:
    if isinstance(value, _Called):
        return not value.width and (any_activation or _is_silu(children[value.name]))
    return isinstance(value, _Activated) and (any_activation or type(value) is _Activated)


def _is_silu(activation: nn.Module) -> bool:
    with torch.no_grad(), _disable_current_modes():
        x = torch.linspace(-8, 8, 33, device="cpu", dtype=torch.float32)
        return torch.allclose(activation(x), F.silu(x), rtol=1e-6, atol=1e-7)
