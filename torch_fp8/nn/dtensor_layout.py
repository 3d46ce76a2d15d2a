"""The local tensors of a linear layer whose weight is sharded by tensor parallelism.

Weight and input are then DTensors on a mesh with one dimension. The placement of the weight
determines the parts that a rank multiplies:

| weight (N, K) | input (..., K) | output (..., N) | gradient of the input |
|---|---|---|---|
| ``Shard(0)``, column-wise | replicated | ``Shard(-1)`` | partial sums |
| ``Shard(1)``, row-wise | ``Shard(-1)`` | partial sums | ``Shard(-1)`` |
| ``Replicate()`` | tokens sharded, or replicated | as the input | as the input |

An input with another placement is redistributed in its own dtype, as torch does.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_fp8.tensor.dtensor import waited


class Parts(NamedTuple):
    """The distribution of a layer's output over the ranks that multiply parts of its operands.

    Attributes:
        mesh: device mesh of one dimension.
        output: placement of the output on the mesh.
        shape: shape of the whole output.
    """

    mesh: Any
    output: Placement
    shape: tuple[int, ...]

    def whole(self, output: Tensor) -> Tensor:
        """Return the DTensor of which `output` is this rank's part."""
        whole = torch.empty(self.shape, device="meta", dtype=torch.float32)
        sizes = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(output, self.mesh, [self.output], run_check=False, **sizes)


def local_operands(
    fp8: Any, input: Any, weight: Any, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Parts]:
    """Return this rank's parts of input, weight and bias, and the distribution of the output.

    Args:
        fp8: `torch_fp8.nn.layer_fp8.LayerFP8` of the layer, for errors.
        input: (..., K); it or the weight is a DTensor.
        weight: (N, K).
        bias: (N,), or None if there is none, or the parallel style adds it.
    Raises:
        ValueError: only one of input and weight is a DTensor, the mesh has several dimensions, or
            the weight is stored transposed.
    """
    mesh, placement = _checked(fp8, input, weight)
    layout = _layout(input, placement)
    if input.placements != (layout.input,):
        input = input.redistribute(placements=[layout.input])
    parts = Parts(mesh, layout.output, (*input.shape[:-1], weight.shape[0]))
    if isinstance(bias, DTensor):
        bias = waited(bias.to_local(grad_placements=[layout.bias_grad]))
        if layout.output.is_partial():  # the sum over ranks must add the bias once
            bias = _Share.apply(bias, mesh.size())
    input = waited(input.to_local(grad_placements=[layout.input_grad]))
    weight = waited(weight.to_local(grad_placements=[layout.weight_grad]))
    return input, weight, bias, parts


def _checked(fp8: Any, input: Tensor, weight: Tensor) -> tuple[Any, Placement]:
    """Return the mesh and the placement of a weight (N, K)."""
    if not isinstance(weight, DTensor):
        raise ValueError(
            f"FP8 linear '{fp8.name}' got a DTensor, but its weight is not one; give it a parallel "
            "style in parallelize_module, or input.to_local()"
        )
    if not isinstance(input, DTensor):
        raise ValueError(
            f"the weight of FP8 linear '{fp8.name}' is sharded as {weight.placements}, but its "
            "input is not a DTensor; use parallelize_module to give it a style that prepares its "
            "input, such as Float8ColwiseParallel or Float8RowwiseParallel (sharded by FSDP2, it "
            "can be called within the forward of the module that fully_shard was given)"
        )
    if fp8.transposed:
        raise ValueError(
            f"the weight of FP8 layer '{fp8.name}' is stored transposed (Conv1D) and sharded as "
            f"{weight.placements}: tensor parallelism in FP8 only supports nn.Linear; keep it in "
            f"high precision with FP8Config(skip=('{fp8.name}',))"
        )
    if weight.device_mesh.ndim != 1:
        raise ValueError(
            f"the weight of FP8 linear '{fp8.name}' is sharded over a mesh of "
            f"{weight.device_mesh.ndim} dimensions, {weight.placements}: FP8 GEMMs take one "
            "dimension; call the layer in the forward of the module that FSDP2 shards over others"
        )
    return weight.device_mesh, weight.placements[0]


class _Share(torch.autograd.Function):
    """Divide x by the number of ranks whose outputs are summed; its gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        return x / ranks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Layout(NamedTuple):
    """A row of the table above, with the placements of the gradients of weight and bias."""

    input: Placement
    output: Placement
    input_grad: Placement
    weight_grad: Placement
    bias_grad: Placement


def _layout(input: DTensor, weight: Placement) -> _Layout:
    last = input.ndim - 1
    if weight.is_shard(0):
        return _Layout(Replicate(), Shard(last), Partial(), weight, Shard(0))
    if weight.is_shard(1):
        return _Layout(Shard(last), Partial(), Shard(last), weight, Replicate())
    (tokens,) = input.placements
    if not tokens.is_shard() or tokens.is_shard(last):
        return _Layout(Replicate(), Replicate(), Replicate(), weight, Replicate())
    return _Layout(tokens, tokens, tokens, Partial(), Partial())
