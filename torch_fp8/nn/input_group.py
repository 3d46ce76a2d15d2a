"""`InputGroup`: layers that read the same input share the two GEMMs of backward.

q, k and v read the output of one norm, gate and up that of another. Each layer runs its own fprop,
so that its output is a contiguous tensor of its own. Backward puts the gradients of the outputs
side by side, casts them once, and runs

    dgrad  dx = g w    contracts N1 + N2 + ...: the sum over the layers stays in float32
    wgrad  dw = g^T x  has the rows of all weights, and each weight's gradient is some of its rows

In autograd's graph, `Join` (`torch_fp8.nn.group_function`) takes the input and all weights and
biases, and returns a stand-in without memory for each output. `Member` turns a stand-in into the
output when its layer is called. So autograd waits for the gradients of all outputs before backward
runs, and a layer that was not called has no gradient. The stand-ins belong to one alias of the
input: they live as long as this forward needs them, and a hook that replaces a layer's input takes
the layer out of its group.

A tensorwise scale serves all members: that of the largest gradient, and of the largest weight.

Legend: M tokens, K in, N out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.nn.class_swap import is_fsdp_class
from torch_fp8.nn.group_function import Join, Member, Members
from torch_fp8.nn.linear_function import LinearOptions, fprop
from torch_fp8.quantization.formats import E5M2, GEMM_ALIGNMENT
from torch_fp8.quantization.payload_shape import SQUARE
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor
from torch_fp8.tensor.split_weight import SplitWeight


def can_group(recipe: Recipe, features: int) -> bool:
    """Return whether a layer with this number of output features can be a member of a group.

    Its scales must come from the current tensors. Blocks must not reach into the next weight, and a
    scale must not cover a row of all weights: rowwise and mxfp8 casts would cast all weights again.
    One tensorwise scale needs the range of E5M2, because gradients of values can be a hundred times
    those of queries and keys.
    """
    if recipe.smooth or recipe.delayed or recipe.weight.granularity not in SQUARE:
        return False
    if recipe.weight.granularity == "tensorwise":
        return recipe.grad_output.format == E5M2 and features % GEMM_ALIGNMENT == 0
    return features % 128 == 0


class InputGroup:
    """Layers of one module that read the same input; see the module docstring.

    Args:
        layers: at least two FP8 layers with one recipe.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = tuple(layers)

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
    if not (isinstance(weight, SplitWeight) or type(weight) is nn.Parameter):
        return False  # sharded, gathered in FP8, or computed by a hook
    if not weight.requires_grad or weight.is_inference() or not layer.fp8_adds_bias:
        return False
    alike = layer.runs_fp8 and fp8.emulate == options.emulate
    return alike and not options.recipe.bf16_forward and not is_fsdp_class(type(layer))


class Reads:
    """The stand-ins of the members of a group for one alias of their input.

    Attributes:
        members: arguments of `Join`.
        stand_ins: stand-in of the output of each layer that was not called yet, with the tensors of
            the layer, by the layer's index.
    """

    def __init__(self, group: InputGroup, x: Tensor, shape: torch.Size, options: Any) -> None:
        layers = group.members(options)
        self.members = Members(options, tuple(layers), [None] * len(layers))
        self.stand_ins: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        if len(layers) < 2:
            return
        weights, biases = [m.weight for m in layers], [m.bias for m in layers]
        outputs = Join.apply(x, shape, self.members, *weights, *biases)
        self.stand_ins = dict(enumerate(zip(outputs, weights, biases, strict=True)))

    def take(self, layer: Any, operands: Any, options: LinearOptions) -> tuple[int, Tensor] | None:
        """Return a layer's index and its stand-in, which serves one call; None: it has none."""
        layers = self.members.layers
        i = next((i for i, member in enumerate(layers) if member is layer), None)
        if i is None or i not in self.stand_ins or not _fits(layer, self.members.options):
            return None
        output, weight, bias = self.stand_ins[i]
        replaced = weight is not operands.weight or bias is not operands.bias
        if replaced or options.out_dtype != self.members.options.out_dtype:
            return None
        del self.stand_ins[i]
        return i, output


def member_output(layer: Any, operands: Any, options: LinearOptions) -> Tensor | None:
    """Compute the output (..., N) of a layer as a member of its group; None: it is alone.

    Args:
        layer: the layer.
        operands: `torch_fp8.nn.layer_fp8.Operands` of the layer.
        options: options of the layer.
    """
    x = operands.input
    if type(x) is not LazyQuantizedTensor or not torch.is_grad_enabled():
        return None
    groups = x.production.groups
    group = next((g for g in groups if any(m is layer for m in g.layers)), None)
    # Without a gradient of the input, the readers' backwards may run one by one. A leaf with a
    # gradient would hold itself through its gradient accumulator.
    if group is None or operands.parts is not None or x.is_leaf:
        return None
    if x.reads is None:
        x.reads = {}
    reads = x.reads.get(group)
    if reads is None:
        if not _fits(layer, options):
            return None
        reads = x.reads[group] = Reads(group, x, operands.shape, options)
    taken = reads.take(layer, operands, options)
    if taken is None:
        return None
    i, output = taken

    def compute() -> Tensor:
        tensors = x, operands.weight, operands.bias, operands.shape
        y, cast_operands = fprop(*tensors, options, options.quantizers, gradients=True)
        reads.members.scales[i] = cast_operands.weight_scale
        return y

    result: Tensor = Member.apply(output, compute)
    return result
