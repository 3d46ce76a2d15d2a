"""`InputGroup`: layers that read the same input share the two GEMMs of backward.

q, k and v read the output of one norm. Each layer runs its own fprop, so that its output is a
contiguous tensor of its own. Backward puts the gradients of the outputs side by side, casts them
once, and runs

    dgrad  dx = g w    contracts N1 + N2 + ...: the sum over the layers stays in float32
    wgrad  dw = g^T x  has the rows of all weights: each weight's gradient is a slice of the result

Each member keeps its own node in autograd's graph (`torch_fp8.nn.group_function`), so that a layer
that was not called has no gradient. The nodes belong to one alias of the input: they live as long
as the graph of this forward, and a hook that replaces a layer's input takes the layer out of its
group.

A tensorwise scale serves all members: that of the largest gradient, and of the largest weight.

Legend: M tokens, K in, N out.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import is_plain, output_dtype, running_backward
from torch_fp8.autograd.function import only_shape_matters, reshaped, written_in_backward
from torch_fp8.nn.class_swap import is_fsdp_class
from torch_fp8.nn.group_function import Exchange, GroupInput, GroupWeight, Output
from torch_fp8.nn.layer_norm import shared
from torch_fp8.nn.linear_function import LinearOptions, graph_options, linear_in_graph
from torch_fp8.nn.scale_buffers import graph_buffers
from torch_fp8.ops.scaled_mm import scaled_matmul
from torch_fp8.quantization.formats import E5M2, GEMM_ALIGNMENT
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor
from torch_fp8.tensor.quantizer import quantize_input
from torch_fp8.tensor.split_weight import SplitWeight, read_scale, scales_of_block


def can_group(recipe: Recipe, features: int) -> bool:
    """Return whether a layer with this number of output features can be a member of a group.

    Its scales must be those of whole, current tensors: a rowwise scale would span the rows of all
    weights and so depend on the group, and blockwise casts have not shown parity in loss yet. One
    scale for all gradients needs the range of E5M2, because gradients of values can be a hundred
    times those of queries and keys.
    """
    if recipe.smooth or recipe.delayed or recipe.weight.granularity != "tensorwise":
        return False
    return recipe.grad_output.format == E5M2 and features % GEMM_ALIGNMENT == 0


class InputGroup:
    """Layers of one module that read the same input; see the module docstring.

    The norm in front owns it. It and its layers refer to each other weakly, so that models have no
    cycles, and a layer that was replaced is freed.

    Args:
        layers: at least two FP8 layers with one recipe.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.__setstate__({"layers": layers})

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._layers = [weakref.ref(layer) for layer in state["layers"]]
        for layer in state["layers"]:
            layer.fp8.group = weakref.ref(self)

    @property
    def layers(self) -> tuple[Any, ...]:
        """The layers that still exist."""
        return tuple([layer for layer in [ref() for ref in self._layers] if layer is not None])

    def members(self, options: LinearOptions) -> list[Any]:
        """Return the layers that can share their backward in this forward.

        Args:
            options: options of the layer that is called first.
        """
        return [layer for layer in self.layers if _fits(layer, options)]


def _fits(layer: Any, options: LinearOptions) -> bool:
    fp8, weight = getattr(layer, "fp8", None), layer._parameters.get("weight")
    if fp8 is None or fp8.frozen is not None or fp8.recipe != options.recipe:
        return False
    if not (type(weight) is nn.Parameter or isinstance(weight, SplitWeight)):
        return False  # sharded, gathered in FP8, or computed by a hook
    if not weight.requires_grad or weight.is_inference() or not layer.fp8_adds_bias:
        return False
    alike = layer.runs_fp8 and fp8.emulate == options.emulate
    return alike and not options.recipe.bf16_forward and not is_fsdp_class(type(layer))


class Reads:
    """The nodes of a group for one alias of their input.

    Attributes:
        backward: backward that recomputes this forward, or -1.
        members: the layers of the group, or none if there is only one.
        waiting: index and token of each member that was not called yet, and the weight, its
            version and the bias that they are for.
    """

    def __init__(self, group: InputGroup, x: Tensor, shape: torch.Size, options: Any) -> None:
        self.backward = running_backward()
        layers = tuple(group.members(options))
        self.exchange = Exchange(options, [m.out_features for m in layers], layers)
        self.members = layers if len(layers) > 1 else ()
        parameters = [(m._parameters["weight"], m._parameters["bias"]) for m in self.members]
        self.waiting: dict[Any, tuple[int, Tensor, Tensor, int, Tensor | None]] = {}
        if self.members:
            self.of_input, of_weights = connect(x, shape, self.exchange, parameters)
            for i, (layer, token) in enumerate(zip(layers, of_weights, strict=True)):
                weight, bias = parameters[i]
                self.waiting[layer] = i, token, weight, weight._version, bias

    def is_over_for(self, layer: Any) -> bool:
        """Return whether a layer is called again: by its module, or by a checkpoint."""
        called = layer in self.members and layer not in self.waiting
        return called or self.backward != running_backward()

    def take(self, layer: Any, operands: Any, options: LinearOptions) -> tuple[int, Tensor] | None:
        """Return a layer's index and its token, which serves one call, or None if it has none."""
        if layer not in self.waiting:
            return None
        (i, token, weight, version, bias), of_group = self.waiting[layer], self.exchange.options
        replaced = weight is not operands.weight or bias is not operands.bias
        products = options.out_dtype, options.recipe, options.emulate
        alike = products == (of_group.out_dtype, of_group.recipe, of_group.emulate)
        if replaced or weight._version != version or not (alike and weight.requires_grad):
            return None
        del self.waiting[layer]
        return i, token


def connect(
    x: Tensor,
    shape: torch.Size,
    exchange: Exchange,
    parameters: Sequence[tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, list[Tensor]]:
    """Return the token of the input (..., K), and those of the members' parameters.

    They are all made before any output, see `torch_fp8.nn.group_function`.
    """
    options = exchange.options
    needs: dict[str, Any] = {"wgrad": True, "fp8_wgrad": options.recipe.wgrad is not None}
    payloads = quantize_input(options.quantizers.input, x, **needs, dtype=options.out_dtype)
    tokens = math.prod(shape[:-1])
    of_weights = [
        GroupWeight.apply(weight, bias, (i, exchange, tokens, payloads))
        for i, (weight, bias) in enumerate(parameters)
    ]
    of_input: Tensor = GroupInput.apply(x, (exchange, shape, parameters[0][0].device))
    return of_input, of_weights


def shared_by_readers(x: Tensor, name: str) -> Tensor:
    """Return the same result of `shared` to all layers that read x.

    The key and value of cross-attention read the encoder's result, which comes from a norm in
    another module, or from a dropout.

    Args:
        x: input (..., C) of a layer. A tensor without a graph, or a leaf, is returned unchanged: a
            leaf would hold itself through its gradient accumulator.
        name: qualified name of the layer.
    """
    if not is_plain(x) or x.grad_fn is None:
        return x
    version, result = getattr(x, "fp8_shared", (None, x))
    if version != x._version:
        result = shared(x, name)
        x.fp8_shared = x._version, result
    return result


def member_output(layer: Any, operands: Any, options: LinearOptions) -> Tensor | None:
    """Compute a layer's output (..., N) as a member of its group, or return None if it has none.

    Args:
        layer: the layer.
        operands: `torch_fp8.nn.layer_fp8.Operands` of the layer.
        options: options of the layer.
    """
    x, group = operands.input, layer.fp8.group()
    if group is None or operands.parts is not None:  # the norm is gone
        return None
    if x.reads is None:
        x.reads = {}
    reads = x.reads[group]() if group in x.reads else None
    if reads is None or reads.is_over_for(layer):
        # Without a gradient of the input, the readers' backwards may run one by one.
        if not x.requires_grad or not _fits(layer, options):
            return None
        reads = Reads(group, x, operands.shape, options)
        # Not a strong reference: a leaf would hold itself through its gradient accumulator.
        x.reads[group] = weakref.ref(reads)
    taken = reads.take(layer, operands, options)
    if taken is None:
        return None
    i, token = taken
    return _output((reads.of_input, token), i, reads.exchange, operands[:4], options, reads)


def _output(
    tokens: tuple[Tensor, Tensor],
    i: int,
    exchange: Exchange,
    operands: tuple[Any, ...],
    options: LinearOptions,
    reads: Reads | None = None,
) -> Tensor:
    """Return the output of member `i`.

    Args:
        tokens: tokens of the input and of the member's parameters.
        i, exchange: index of the member; what the functions of its group share.
        operands: first arguments of `torch_fp8.nn.linear_function.linear`.
        options: options of the layer.
        reads: object that has to live as long as the graph behind the output.
    """

    def compute() -> Tensor:
        x, weight, bias, shape = operands
        quantizers, observer = options.quantizers, options.quantizers.observer
        w = quantizers.weight.for_fprop(weight)
        if type(x) is LazyQuantizedTensor:
            a: Any = x.production.rowwise(quantizers.input)
        else:
            a, _, _ = quantizers.input(x, rowwise=True, columnwise=False)
        if observer is not None:
            observer.weight(weight, w)
            observer.input(x, a, None)
        exchange.scales[i], fast_accum = w.scale, options.recipe.fprop.fast_accum
        out_dtype, emulate = options.out_dtype, options.emulate
        # (M, K) @ (N, K)^T, both along K
        y = scaled_matmul(a, w, out_dtype, bias=bias, fast_accum=fast_accum, emulate=emulate)
        return reshaped(y, (*shape[:-1], y.shape[-1]))  # (M, N) -> (..., N)

    return Output.apply(*tokens, (i, exchange, compute, reads))


# ---- in graphs of torch.compile ------------------------------------------------------------------


def graph_operands(layer: Any) -> tuple[int, int, list[Tensor | None]]:
    """Return a layer's index in its group, the number of members, and their tensors, for a graph.

    The tensors are the weights and biases of all members, the tables with the scales of the
    weights' payloads, and the buffers of the first member, if it has any: the members share an
    input and the cast of their gradients, which its slots record. Dynamo traces this. There are no
    tensors if the layer has no group in this graph.
    """
    fp8, group = layer.fp8, layer.fp8.group()
    if group is None or fp8.recipe.bf16_forward:
        return 0, 0, []
    members = [m for m in group.layers if _fits_graph(m, fp8)]
    buffers = [] if fp8.scaling is None or len(members) < 2 else graph_buffers(members[0])
    for i, member in enumerate(members):
        if member is layer and len(members) > 1:
            weights, biases = [m.weight for m in members], [m.bias for m in members]
            scales = [scales_of_block(weight) for weight in weights]
            return i, len(members), [*weights, *biases, *scales, *buffers]
    return 0, 0, []


def _fits_graph(layer: Any, fp8: Any) -> bool:
    other = getattr(layer, "fp8", None)
    if other is None or other.casts != fp8.casts or other.frozen is not None:
        return False
    if other.scales_known != fp8.scales_known:
        return False
    weight = layer.weight
    if isinstance(weight, (DTensor, QuantizableTensor)) and not isinstance(weight, SplitWeight):
        return False
    return bool(weight.requires_grad and layer.runs_fp8 and layer.fp8_adds_bias)


@torch.compiler.allow_in_graph
def member_in_graph(
    x: Tensor, i: int, num: int, casts: tuple[str, bool], *tensors: Tensor | None
) -> Tensor:
    """Compute the output of member `i` as a single node of Dynamo's graph.

    Args:
        x: input (..., K) of the layer. Members share their backward if it is computed in the same
            graph.
        i, num, tensors: see `graph_operands`.
        casts: see `torch_fp8.nn.linear_function.linear_in_graph`.
    """
    weights: Any = tensors[:num]
    biases, scales, buffers = tensors[num : 2 * num], tensors[2 * num : 3 * num], tensors[3 * num :]
    if only_shape_matters(x) or x.is_leaf:
        return linear_in_graph(x, weights[i], biases[i], casts, scales[i], *buffers)
    text, training = casts
    key = tuple(id(weight) for weight in weights)
    reads = vars(x).setdefault("fp8_reads", {})
    if key not in reads:
        written_in_backward(buffers[-1:])
        for weight, of_block in zip(weights, scales, strict=True):
            read_scale(weight, of_block)
        options = graph_options(text, x.dtype, output_dtype(x), training)
        options = options._replace(quantizers=options.quantizers_of(buffers))
        exchange = Exchange(options, [weight.shape[0] for weight in weights])
        reads[key] = (
            exchange,
            *connect(x, x.shape, exchange, list(zip(weights, biases, strict=True))),
        )
    exchange, of_input, of_weights = reads[key]
    operands = x, weights[i], biases[i], x.shape
    return _output((of_input, of_weights[i]), i, exchange, operands, exchange.options)
