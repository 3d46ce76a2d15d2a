"""`Float8GatedMLP`: ``down(silu(gate(x)) * up(x))`` whose product is handed over in FP8.

Converted are modules whose own forward is exactly this of three of their children, whatever their
names: it is run once on symbols that record what is done with them. The children are called as the
module calls them, so hooks, adapters and parallel styles on them go on; only the product in between
is ours, and x is cast once for gate and up.

For backward the product keeps gate and up in E4M3 with a scale for each 128 elements of a row, 2.06
bytes for each of their elements together, where eager Hugging Face code keeps 8 (gate, silu(gate),
up and the product in BF16); silu is computed again. The gradients of gate and up leave the backward
in FP8, in the layouts that the two layers' GEMMs take.

The product is computed in float32 and rounded once.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.config import FP8Config
from torch_fp8.linear import INPUT, Float8Linear
from torch_fp8.module_class import add_mixin, remove_mixin
from torch_fp8.produced_activation import (
    Layouts,
    ProducedActivation,
    Production,
    plain,
    shared,
    to_layouts,
)
from torch_fp8.quantize import quantize_layouts
from torch_fp8.recipe import CastSpec
from torch_fp8.scaling import tensor_amax
from torch_fp8.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_amax,
    swiglu_backward_quantize,
    swiglu_quantize,
    swiglu_save,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MLPForm(NamedTuple):
    """Names of the children of a gated MLP."""

    gate: str
    up: str
    down: str


class _Options(NamedTuple):
    name: str
    keep: bool
    save_fp8: bool
    row_only: bool
    blocks: CastSpec | None
    """The cast that the layer behind makes, where its scales need nothing but the product."""


class Float8GatedMLP(nn.Module):
    """The part of a converted gated MLP that goes in front of its own class."""

    fp8_config: FP8Config
    fp8_name: str
    fp8_form: MLPForm

    def forward(self, x: Tensor) -> Tensor:
        names = self.fp8_form
        gate_layer, up_layer, down_layer = (getattr(self, name) for name in names)
        if not (self.training or self.fp8_config.eval_fp8):
            stock: Tensor = super().forward(x)
            return stock
        if _in_fp8(gate_layer) and _in_fp8(up_layer):
            x = shared(x, self.fp8_name)
        gate, up = gate_layer(x), up_layer(x)
        if type(gate) is Tensor and type(up) is Tensor and _alike(gate, up):
            product = _SwiGLUFunction.apply(gate, up, self._options(down_layer))
        else:  # DTensors, or what an adapter makes of them
            product = F.silu(plain(gate)) * plain(up)
        del gate, up
        output: Tensor = down_layer(product)
        return output

    def _options(self, down_layer: nn.Module) -> _Options:
        blocks, row_only = None, False
        if _in_fp8(down_layer):
            assert isinstance(down_layer, Float8Linear)
            spec = down_layer.operand_spec(INPUT)
            if spec.granularity.startswith("block"):
                blocks = spec
            wgrad = down_layer.weight.requires_grad and down_layer.fp8_recipe.wgrad is not None
            row_only = not (wgrad and torch.is_grad_enabled())
        return _Options(
            self.fp8_name,
            torch.is_grad_enabled(),
            self.fp8_config.save_activations == "fp8",
            row_only,
            blocks,
        )


class _SwiGLUFunction(torch.autograd.Function):
    """gate, up (..., C) -> silu(gate) * up, a `ProducedActivation`; plain in a compiled graph."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, options: _Options) -> Tensor:
        compiling = torch.compiler.is_compiling()
        shape, dtype = gate.shape, gate.dtype
        gate_rows, up_rows = _matrix(gate), _matrix(up)
        keep = options.keep and any(ctx.needs_input_grad[:2])
        save = keep and options.save_fp8
        made: Layouts | None = None
        amax: Tensor | None = None
        saved: tuple[Tensor, ...] = (gate, up)
        if save and options.blocks is not None and not compiling:
            made, saved = _cast_and_save(gate_rows, up_rows, options.blocks, not options.row_only)
        elif save:
            *saved_parts, amax = swiglu_save(gate_rows, up_rows, None)
            saved = tuple(saved_parts)
        if keep:
            ctx.save_for_backward(*saved)
            ctx.name, ctx.shape, ctx.dtype, ctx.plain = options.name, shape, dtype, compiling
        if compiling:
            return swiglu(gate_rows, up_rows, None).view(shape)
        product = _product(gate_rows.detach(), up_rows.detach(), amax, options)
        if made is not None and options.blocks is not None:
            product.keep(options.blocks, made)
        return ProducedActivation(product, shape, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _Gradients(_matrix(plain(grad)), ctx.saved_tensors, ctx.dtype)
        grads: list[Tensor | None] = []
        for i, wanted in enumerate(ctx.needs_input_grad[:2]):
            if not wanted:
                grads.append(None)
            elif ctx.plain:
                grads.append(gradients.dense(i).view(ctx.shape))
            else:
                production = gradients.production(i, ctx.name)
                grads.append(ProducedActivation(production, ctx.shape, ctx.dtype))
        return (*grads, None)


def _product(gate: Tensor, up: Tensor, amax: Tensor | None, options: _Options) -> Production:
    # None of these may hold the production: a cycle would keep gate and up until it is collected.
    def dense() -> Tensor:
        return swiglu(gate, up, None)

    def layouts(spec: CastSpec, scale: Tensor | None, row: bool, col: bool) -> Layouts:
        current = spec.granularity == "tensorwise" and scale is None
        if current and amax is None:
            return quantize_layouts(dense(), spec, None, row=row, col=col)
        made = swiglu_quantize(
            gate,
            up,
            None,
            amax if current else None,
            scale,
            spec.format.dtype,
            spec.granularity,
            spec.power_of_two,
            row,
            col,
            False,
        )
        return to_layouts(made[:4], spec, scale, row, col)

    def largest() -> Tensor:
        return tensor_amax(dense()) if amax is None else amax

    return Production(options.name, (gate, up), dense, layouts, largest)


def _cast_and_save(
    gate: Tensor, up: Tensor, spec: CastSpec, col: bool
) -> tuple[Layouts, tuple[Tensor, ...]]:
    """The product in blocks, and gate and up as they are saved, in one read."""
    made = swiglu_quantize(
        gate,
        up,
        None,
        None,
        None,
        spec.format.dtype,
        spec.granularity,
        spec.power_of_two,
        True,
        col,
        True,
    )
    return to_layouts(made[:4], spec, None, True, col), made[4:8]


class _Gradients:
    """Both gradients, cast in one read when the first of them is asked for.

    Args:
        grad: (R, C), of the product.
        saved: gate, up, or gate, its scale, up, its scale.
        dtype: of gate and up.
    """

    def __init__(self, grad: Tensor, saved: tuple[Tensor, ...], dtype: torch.dtype) -> None:
        if len(saved) == 2:
            gate, up = _matrix(saved[0]), _matrix(saved[1])
            self.inputs = (grad, gate, None, up, None, None, dtype)
        else:
            gate, gate_scale, up, up_scale = saved
            self.inputs = (grad, gate, gate_scale, up, up_scale, None, dtype)
        self._dense: dict[int, Tensor] = {}
        self._made: dict[tuple[int, CastSpec, bool, bool], Layouts] = {}
        self._amax: Tensor | None = None

    def production(self, i: int, name: str) -> Production:
        """Gradient `i`."""
        return Production(
            name,
            self.inputs[:1],
            lambda: self.dense(i),
            lambda spec, scale, row, col: self.layouts(i, spec, scale, row, col),
            lambda: self.amax()[i],
        )

    def dense(self, i: int) -> Tensor:
        """Gradient `i`, plain; to be asked for once."""
        if i not in self._dense:
            self._dense = dict(enumerate(swiglu_backward(*self.inputs)))
        return self._dense.pop(i)

    def amax(self) -> Tensor:
        """(2,) float32."""
        if self._amax is None:
            self._amax = swiglu_backward_amax(*self.inputs)
        return self._amax

    def layouts(
        self, i: int, spec: CastSpec, scale: Tensor | None, row: bool, col: bool
    ) -> Layouts:
        """Gradient `i` in FP8."""
        if scale is not None or spec.granularity == "rowwise":  # a scale of each, or no fusion
            return quantize_layouts(self.dense(i), spec, scale, row=row, col=col)
        if (i, spec, row, col) not in self._made:
            tensorwise = spec.granularity == "tensorwise"
            made = swiglu_backward_quantize(
                *self.inputs,
                self.amax() if tensorwise else None,
                None,
                spec.format.dtype,
                spec.granularity,
                spec.power_of_two,
                row,
                col,
            )
            for j in range(2):
                part = made[4 * j : 4 * j + 4]
                self._made[j, spec, row, col] = to_layouts(part, spec, None, row, col)
        return self._made.pop((i, spec, row, col))


def convert_gated_mlp(module: nn.Module, name: str, config: FP8Config) -> bool:
    """Make a gated MLP a `Float8GatedMLP`, in place; False, and nothing done, if it is none.

    Only where one of its three layers runs in FP8.
    """
    if not isinstance(module, Float8GatedMLP):
        form = _form_of(module)
        if form is None:
            return False
        add_mixin(module, Float8GatedMLP)
        assert isinstance(module, Float8GatedMLP)
        module.fp8_form = form
    module.fp8_config, module.fp8_name = config, name
    return True


def revert_gated_mlp(module: Float8GatedMLP) -> None:
    """Undo `convert_gated_mlp`."""
    for name in ("fp8_config", "fp8_name", "fp8_form"):
        delattr(module, name)
    remove_mixin(module, Float8GatedMLP)


def _in_fp8(layer: nn.Module) -> bool:
    return isinstance(layer, Float8Linear) and layer.runs_fp8


def _alike(gate: Tensor, up: Tensor) -> bool:
    return gate.shape == up.shape and gate.dtype == up.dtype and gate.dtype in _DTYPES


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Symbol:
    """A value of which only is known how it came about."""

    def __init__(self, *made: Any) -> None:
        self.made = made

    def __mul__(self, other: Any) -> "_Symbol":
        return _Symbol("mul", self, other)

    def __rmul__(self, other: Any) -> "_Symbol":
        return _Symbol("mul", other, self)


def _form_of(module: nn.Module) -> MLPForm | None:
    """The names of gate, up and down, if that is what the module computes."""
    children = dict(module.named_children())
    layers = [name for name, child in children.items() if _has_linear(child)]
    if len(layers) != 3 or "forward" in module.__dict__:
        return None
    x = _Symbol("x")
    trial = SimpleNamespace(**{n: functools.partial(_Symbol, n) for n in children})
    try:
        output = type(module).forward(trial, x)
        down, product = output.made
        _, left, right = product.made
        for activated, up in ((left, right), (right, left)):
            if len(activated.made) == 2 and len(up.made) == 2 and up.made[1] is x:
                activation, gate = activated.made
                if gate.made[1] is x and _is_silu(children[activation]):
                    form = MLPForm(gate.made[0], up.made[0], down)
                    return form if sorted(form) == sorted(layers) else None
    except Exception:  # it does something else with them
        return None
    return None


def _has_linear(child: nn.Module) -> bool:
    """A linear layer, or an adapter around one."""
    return any(isinstance(m, nn.Linear) for m in child.modules())


def _is_silu(activation: nn.Module) -> bool:
    with torch.no_grad(), _disable_current_modes():
        x = torch.linspace(-8, 8, 33, device="cpu")
        return torch.allclose(activation(x), F.silu(x), rtol=1e-6, atol=1e-7)
