"""`Float8GatedMLP`: ``down(silu(gate(x)) * up(x))``, whose product reaches down in FP8.

Conversion picks modules whose own forward is exactly this formula
(`torch_fp8.conversion.detect_producers`). gate and up are two layers, or one layer whose output
holds both. The children are called as before, so that hooks, adapters and parallel styles on them
keep working. Only the product is computed here, and x is cast once for gate and up.

For backward, the product saves gate and up in E4M3 with a scale for each 128 elements of a row:
2.06 bytes per element of both together, where eager Hugging Face code saves 8 (gate, silu(gate), up
and the product in BF16). Backward recomputes silu, and returns the gradients of gate and up in FP8,
in the layouts that the GEMMs of the two layers read, or as one gradient for a single layer.

The product is computed in float32 and rounded once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import RunsFP8, is_plain, is_transformed, saves_nothing
from torch_fp8.autograd.function import (
    Function,
    of_text,
    once_differentiable,
    only_shape_matters,
    shape_of_result,
)
from torch_fp8.config import FP8Config
from torch_fp8.kernels.arguments import BackwardInputs
from torch_fp8.nn.delayed_scaling import GRAD_OUTPUT, INPUT
from torch_fp8.nn.input_group import InputGroup
from torch_fp8.nn.layer_norm import shared
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.nn.linear_function import PlainOperands, graph_options
from torch_fp8.nn.scale_buffers import graph_buffers
from torch_fp8.nn.swiglu_function import Gradients, JoinedGradient, Product, cast_and_save
from torch_fp8.nn.trial_reads import TrialReads
from torch_fp8.ops.quantize import saved_stand_ins
from torch_fp8.ops.swiglu import swiglu
from torch_fp8.ops.swiglu_backward import halves
from torch_fp8.quantization.formats import CAST_DTYPES
from torch_fp8.tensor.base import Payloads
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor, plain
from torch_fp8.tensor.quantizer import Quantizer, Quantizers, with_source


class GatedMLPSpec(NamedTuple):
    """Names of the layers of a gated MLP.

    Attributes:
        inputs: names of the layers gate and up, or of one layer with an output (..., 2 C) for both.
        down: name of the down layer.
        gate_first: whether gate is the first of the two layers, or the first half of the output.
    """

    inputs: tuple[str, ...]
    down: str
    gate_first: bool = True


class _Options(NamedTuple):
    name: str
    keep: bool
    save_fp8: bool
    ahead: Quantizer | None
    """Quantizer of the down layer, if the product can be cast when it is computed."""
    gradients: tuple[Quantizer, Quantizer] | None
    """Quantizers of the gradients of gate and up, if both scales are known."""
    gate_first: bool
    """Whether gate is the first half of a tensor with both."""
    in_graph: bool = False
    """Whether torch.compile traces; all results are plain tensors then."""
    save: Callable[..., Sequence[Any]] = PlainOperands.save_swiglu
    """Function that saves gate and up, if the product is cast later."""


class MLPFP8(NamedTuple):
    """State that conversion adds to a gated MLP, as its attribute `fp8`.

    Attributes:
        name: qualified name, for errors.
        config: configuration of the MLP.
        spec: names of its layers.
        reads: attributes with which its forward is the formula, including those of the activation,
            which is not called.
        group: group of gate and up, or None.
    """

    name: str
    config: FP8Config
    spec: GatedMLPSpec
    reads: TrialReads
    group: InputGroup | None = None


class Float8GatedMLP(RunsFP8):
    """Mixin of a converted gated MLP, in front of its own class.

    Shapes: input (..., K), product (..., C), output (..., N).
    """

    fp8: MLPFP8

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        compiling, spec = torch.compiler.is_compiling(), self.fp8.spec
        in_fp8 = self.runs_fp8 and (compiling or not is_transformed())
        more = len(args) != 1 or kwargs  # further arguments, or the input by keyword
        if more or not in_fp8 or not self.fp8.reads.hold(self, self.fp8.name):
            return super().forward(*args, **kwargs)
        (x,) = args
        down_layer = getattr(self, spec.down)
        inputs = self._project(x)
        is_ours = all(is_plain(t) for t in inputs) and _fit(inputs)
        if is_ours and compiling:
            product = self._in_graph(inputs, down_layer)
        elif is_ours and not torch.is_grad_enabled():
            product = _unread(self.fp8.name, self.fp8.spec.gate_first, inputs)
        elif is_ours:
            product = _SwiGLUFunction.apply(self._options(down_layer), *inputs)
        else:  # DTensors, or the results of adapters
            gate, up = _gate_and_up([plain(t) for t in inputs], self.fp8.spec.gate_first)
            product = F.silu(gate) * up
            del gate, up
        del inputs
        return down_layer(product)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = [getattr(self, name) for name in self.fp8.spec.inputs]
        if len(layers) > 1 and not torch.compiler.is_compiling() and all(map(_in_fp8, layers)):
            x = shared(x, self.fp8.name)
        return tuple([layer(x) for layer in layers])

    def _options(self, down_layer: Any) -> _Options:
        ahead, save = None, PlainOperands.save_swiglu
        if _in_fp8(down_layer):
            down, wgrad = down_layer.fp8, down_layer.weight.requires_grad
            ahead = down.producer_quantizer(down_layer, INPUT)
            save = down.operand_class.save_swiglu
            if ahead is not None:
                ahead = ahead._replace(columnwise_usage=wgrad and down.recipe.wgrad is not None)
        fp8, readers = self.fp8, self._gradient_readers()
        save_fp8 = fp8.config.save_activations == "fp8"
        options = fp8.name, True, save_fp8, ahead, readers, fp8.spec.gate_first
        return _Options(*options, save=save)

    def _in_graph(self, inputs: tuple[Tensor, ...], down_layer: Any) -> Tensor:
        """Compute the product in a graph of torch.compile."""
        down, down_wgrad, casts = None, False, None
        of_down: tuple[Tensor, ...] = ()
        of_inputs: tuple[Tensor, ...] = ()
        if _in_fp8(down_layer):
            down, down_wgrad = down_layer.fp8.casts, down_layer.weight.requires_grad
            of_down = _known(down_layer)
        layers = [getattr(self, name) for name in self.fp8.spec.inputs]
        if len(layers) == 2 and all(map(_in_fp8, layers)):
            gate, up = layers
            if gate.fp8.casts == up.fp8.casts and _known(gate) and _known(up):
                casts, of_inputs = gate.fp8.casts, (*_known(gate), *_known(up))
        of_layers = (down, down_wgrad, casts, down_layer.training), of_down, of_inputs
        save_fp8 = self.fp8.config.save_activations == "fp8"
        return _product_in_graph(save_fp8, self.fp8.spec.gate_first, *of_layers, *inputs)

    def _gradient_readers(self) -> tuple[Quantizer, Quantizer] | None:
        """Return the quantizers of two gradients whose scales are known, or None to cast later."""
        layers = [getattr(self, name) for name in self.fp8.spec.inputs]
        if len(layers) < 2 or not all(map(_in_fp8, layers)):
            return None
        of_gate, of_up = (layer.fp8.producer_quantizer(layer, GRAD_OUTPUT) for layer in layers)
        if of_gate is None or of_up is None or of_gate.spec != of_up.spec:
            return None
        return of_gate, of_up


class _SwiGLUFunction(Function):
    """Compute silu(gate) * up (..., C) as a `LazyQuantizedTensor`; plain in a compiled graph.

    `first` and `second` are gate and up (..., C), or one tensor (..., 2 C) with both, and None.
    They are not ``*inputs``, because torch.compile of torch 2.13 omits ``ctx`` if no gradient is
    needed and the number of arguments equals the number of names in the signature.
    """

    @staticmethod
    def forward(ctx: Any, options: _Options, first: Tensor, second: Tensor | None = None) -> Tensor:
        inputs: tuple[Tensor, ...] = (first,) if second is None else (first, second)
        gate, up = _gate_and_up([_matrix(t) for t in inputs], options.gate_first)
        shape, dtype = (*inputs[0].shape[:-1], gate.shape[1]), gate.dtype
        keep = options.keep and any(ctx.needs_input_grad[1:])
        save = keep and options.save_fp8
        payloads: Payloads | None = None
        amax: Tensor | None = None
        saved: Sequence[Tensor] = inputs
        dropped = save and saves_nothing()
        ahead = options.ahead
        if save and ahead is not None and not dropped:
            payloads, saved = cast_and_save(gate, up, ahead)
        elif save and ahead is None:
            *saved, amax = options.save(gate, up, not dropped)
        if dropped:
            saved = (*saved_stand_ins(gate), *saved_stand_ins(up))
        if keep:
            ctx.save_for_backward(*saved)
            ctx.name, ctx.dtype, ctx.plain = options.name, dtype, options.in_graph
            ctx.shape, ctx.joined = inputs[0].shape, len(inputs) == 1
            ctx.gate_first, ctx.saved_fp8 = options.gate_first, save
            ctx.readers = options.gradients
        production = Product(gate.detach(), up.detach(), amax).source(options.name)
        if payloads is not None and ahead is not None:
            production.keep(ahead, payloads)
        if options.in_graph:
            return with_source(swiglu(gate, up, None).view(shape), production)  # (R, C) -> (..., C)
        return LazyQuantizedTensor(production, shape, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.saved_fp8:
            gate, gate_scale, up, up_scale = ctx.saved_tensors
        else:
            gate, up = _gate_and_up([_matrix(t) for t in ctx.saved_tensors], ctx.gate_first)
            gate_scale = up_scale = None
        rows = _matrix(plain(grad))  # (..., C) -> (R, C)
        inputs = BackwardInputs(rows, gate, gate_scale, up, up_scale, ctx.dtype)
        gradients: JoinedGradient | Gradients
        if ctx.joined:
            gradients = JoinedGradient(inputs, ctx.gate_first)
        else:
            gradients = Gradients(inputs, ctx.readers, ctx.plain)
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for i, is_needed in enumerate(ctx.needs_input_grad[1:]):
            if is_needed:
                source = gradients.production(i, ctx.name)
                if ctx.plain:
                    grads[i + 1] = with_source(gradients.dense(i).view(ctx.shape), source)
                else:
                    grads[i + 1] = LazyQuantizedTensor(source, ctx.shape, ctx.dtype)
        return tuple(grads)


@torch.compiler.allow_in_graph
def _product_in_graph(
    save_fp8: bool,
    gate_first: bool,
    layers: tuple[str | None, bool, str | None, bool],
    of_down: tuple[Tensor, ...],
    of_inputs: tuple[Tensor, ...],
    *inputs: Tensor,
) -> Tensor:
    """Call `_SwiGLUFunction` as a single node of Dynamo's graph; see `as_text`.

    Args:
        save_fp8, gate_first: fields of `_Options`.
        layers: casts of the down layer, or None, and whether its weight needs a gradient; casts of
            gate and up, if their scales are known; whether they are in training mode.
        of_down, of_inputs: buffers of these layers with known scales (`_known`), or none.
        inputs: tensors of `_SwiGLUFunction`.
    """
    (down, trains_down, casts, training), first = layers, inputs[0]
    if only_shape_matters(first):
        width = first.shape[-1] // (3 - len(inputs))
        return shape_of_result((*first.shape[:-1], width), first.dtype, *inputs)

    def quantizers(casts: str, buffers: tuple[Tensor, ...]) -> Quantizers:
        return graph_options(casts, first.dtype, first.dtype, training).quantizers_of(buffers)

    keep, ahead, readers = torch.is_grad_enabled(), None, None
    if down is not None:
        recipe, *_, operand_class = of_text(down)
        # A rowwise cast is not fused, but one operator both casts and saves gate and up: selective
        # checkpointing would recompute a separate save in backward, with two GEMMs.
        has_scale = recipe.input.granularity != "tensorwise" or of_down
        if has_scale and operand_class.independent:
            wgrad = keep and trains_down and recipe.wgrad is not None
            ahead = quantizers(down, of_down).input._replace(columnwise_usage=wgrad)
    if casts is not None:
        of_gate, of_up = quantizers(casts, of_inputs[:5]), quantizers(casts, of_inputs[5:])
        readers = of_gate.grad_output, of_up.grad_output
    options = _Options("", keep, save_fp8, ahead, readers, gate_first, True)
    return _SwiGLUFunction.apply(options, *inputs)


def _known(layer: Float8Linear) -> tuple[Any, ...]:
    """Return the buffers of delayed scaling of a layer in a graph, if its scales are known."""
    known = layer.fp8.scales_known and not isinstance(layer.weight, DTensor)
    return graph_buffers(layer) if known else ()


def _unread(name: str, gate_first: bool, inputs: Sequence[Tensor]) -> Tensor:
    """Return the product in a forward without gradients, without autograd's bookkeeping."""
    gate, up = _gate_and_up([_matrix(t.detach()) for t in inputs], gate_first)
    shape = (*inputs[0].shape[:-1], gate.shape[1])
    return LazyQuantizedTensor(Product(gate, up).source(name), shape, gate.dtype)


def _in_fp8(layer: nn.Module) -> bool:
    return isinstance(layer, Float8Linear) and layer.runs_fp8


def _fit(inputs: Sequence[Tensor]) -> bool:
    """Return whether gate and up have equal shapes, and a dtype that the kernels take."""
    if len(inputs) == 1:
        return inputs[0].dtype in CAST_DTYPES and inputs[0].shape[-1] % 2 == 0
    gate, up = inputs
    return gate.shape == up.shape and gate.dtype == up.dtype and gate.dtype in CAST_DTYPES


def _gate_and_up(inputs: Sequence[Tensor], gate_first: bool) -> tuple[Tensor, Tensor]:
    if len(inputs) == 1:
        return halves(inputs[0], gate_first)
    gate, up = inputs
    return gate, up


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
