"""Detection of gated MLPs, ``down(silu(gate(x)) * up(x))``, by a trial run.

The module's own forward runs on a twin whose linear layers return given values of gate and up, and
note their arguments. It is a gated MLP if each layer runs once, gate and up on the input itself,
down on the product of the formula, and if the forward returns what down returns. Names do not
matter. gate and up are two layers, or the halves (in either order) of the last dimension of one
layer's output. `torch_fp8.nn.trial_reads` notes what the forward reads in the trial.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.config import FP8Config
from torch_fp8.nn.class_swap import own_child
from torch_fp8.nn.gated_mlp import Float8GatedMLP, GatedMLPSpec
from torch_fp8.nn.layer_filter import is_linear
from torch_fp8.nn.trial_reads import Recorder, TrialReads, computes_alike

Product = Callable[[Tensor, Tensor], Tensor]
"""What down reads, as a function of gate and up, (N,) each."""


class FoundMLP(NamedTuple):
    """A gated MLP: the names of its layers, and what its forward read in the trial."""

    spec: GatedMLPSpec
    reads: TrialReads


def find_gated_mlp(module: nn.Module) -> FoundMLP | None:
    """Return what a gated MLP consists of, or None if the module computes anything else."""
    spec, recorder = _tried(module, lambda product: _is(product, lambda g, u: F.silu(g) * u))
    reads = None if recorder is None else recorder.reads()
    return None if spec is None or reads is None else FoundMLP(spec, reads)


def find_gated_layers(module: nn.Module) -> GatedMLPSpec | None:
    """Return the layers of a gated MLP with any activation, such as GeGLU's, or None."""
    return _tried(module, _is_linear_in_up)[0]


def _tried(
    module: nn.Module, is_formula: Callable[[Product], bool]
) -> tuple[GatedMLPSpec | None, Recorder | None]:
    """Return the layers whose product has a formula, and the recorder of the trial."""
    children = dict(module.named_children())
    widths = {n: width for n, child in children.items() if (width := _width(child))}
    if len(widths) not in (2, 3) or "forward" in module.__dict__:
        return None, None
    others = [n for n in children if n not in widths]
    for spec in _specs(widths):
        try:
            inner = {n: Recorder(children[n], {"training": True}) for n in others}
            recorder = Recorder(module, {"training": True, **inner})
            with _disable_current_modes():
                for training in (True, False):
                    for each in (recorder, *inner.values()):
                        each.give("training", training)
                    if not is_formula(_Trial(recorder, spec, widths[spec.inputs[0]])):
                        break
                else:
                    return spec, recorder
        except Exception:  # the forward does something else with its layers
            continue
    return None, None


def _specs(widths: dict[str, int]) -> Iterator[GatedMLPSpec]:
    for down in widths:
        inputs = tuple(name for name in widths if name != down)
        if len(inputs) == 2:
            yield from (GatedMLPSpec(inputs, down), GatedMLPSpec(inputs[::-1], down))
        elif widths[inputs[0]] % 2 == 0:
            yield from (GatedMLPSpec(inputs, down, first) for first in (True, False))


class _Trial:
    """The `Product` of a twin's forward; any other use of its layers raises NotImplementedError."""

    def __init__(self, recorder: Recorder, spec: GatedMLPSpec, width: int) -> None:
        self._recorder, self._spec = recorder, spec
        self._size = width if len(spec.inputs) == 2 else width // 2

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        x, result, spec = object(), object(), self._spec
        # (N,) -> (1, rows, size), the last row filled with zeros
        parts = [F.pad(v, (0, -len(v) % self._size)).view(1, -1, self._size) for v in (gate, up)]
        parts = parts if spec.gate_first else parts[::-1]
        outputs = parts if len(spec.inputs) == 2 else [torch.cat(parts, -1)]
        calls: list[tuple[str, Any]] = []

        def layer(name: str, output: Any, argument: Any) -> Any:
            calls.append((name, argument))
            return output

        for name, output in zip((*spec.inputs, spec.down), (*outputs, result), strict=True):
            self._recorder.give(name, partial(layer, name, output))
        with _ShapesAlone():
            returned = self._recorder.twin.forward(x)
        *on_input, (last, product) = calls
        is_input = [value is x for _, value in on_input]
        once = sorted(name for name, _ in on_input) == sorted(spec.inputs)
        if returned is not result or last != spec.down or not (once and all(is_input)):
            raise NotImplementedError
        return product.flatten()[: len(gate)]


class _ShapesAlone(TorchFunctionMode):
    """Refuses questions about tensors apart from their shape: code may branch on the answers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ == "__get__" and func != Tensor.shape.__get__:
            raise NotImplementedError
        return func(*args, **(kwargs or {}))


def _is_linear_in_up(product: Product) -> bool:
    return _is(product, lambda g, u: product(g, torch.ones_like(u)) * u) and not _is(
        product, lambda g, u: product(torch.ones_like(g), u) * g
    )


def _is(product: Product, formula: Product) -> bool:
    """Return whether two functions of gate and up agree."""
    pairs = (lambda x, f=f: f(*x.reshape(-1, 2).unbind(1)) for f in (product, formula))
    return computes_alike(*pairs)


def _width(child: nn.Module) -> int:
    """Return the output features of a linear layer, or of an adapter around one; 0: neither."""
    return max((m.out_features for m in child.modules() if isinstance(m, nn.Linear)), default=0)


def down_projections(model: nn.Module, configs: Iterable[FP8Config]) -> dict[nn.Module, str]:
    """Return the down projections of the gated MLPs of a model, with the names of the MLPs.

    If an adapter wraps such a layer, this is the base layer, PEFT's ``base_layer``.

    Args:
        model: any model.
        configs: configurations of the layers; the result is empty unless one has Smooth-SwiGLU.
    """
    names: dict[nn.Module, str] = {}
    if not any(config.smooth_swiglu for config in configs):
        return names
    for name, module, spec in gated_mlps(model):
        layer = getattr(module, spec.down)
        layer = own_child(layer, "base_layer") or layer
        if layer is not None and is_linear(layer):
            names[layer] = name
    return names


def gated_mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module, GatedMLPSpec]]:
    """Yield (name, module, names of its layers) of the gated MLPs, with any activation."""
    for name, module in model.named_modules():
        if isinstance(module, Float8GatedMLP):
            yield name, module, module.fp8.spec
        else:
            spec = find_gated_layers(module)
            if spec is not None:
                yield name, module, spec
