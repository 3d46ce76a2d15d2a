"""Redistributions of DTensors: gathers run in FP8, sums in the tensors' dtype.

`replicate` is for the input of column-wise layers, `reduce` for the output of row-wise layers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from torch_fp8.autograd.current_pass import output_dtype
from torch_fp8.distributed.tensor_parallel.all_gather import (
    AllGatheredFloat8Tensor,
    Shards,
    gather_activation,
)
from torch_fp8.nn.delayed_scaling import GRAD_OUTPUT, INPUT
from torch_fp8.nn.linear import Float8Linear
from torch_fp8.ops.scaled_mm import cast
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.dtensor import waited


def replicate(
    x: Tensor, mesh: DeviceMesh, layout: Placement, linear: Float8Linear, *, gather_again: bool
) -> DTensor:
    """Replicate the input of column-wise layers, as the first of them casts it.

    Forward gathers a sharded input in FP8. Backward sums the ranks' gradients in the dtype of
    autocast, or of the input without autocast.

    Args:
        x: a DTensor, or this rank's part of one as a plain tensor.
        mesh: a mesh of one dimension.
        layout: the placement of a plain tensor.
        linear: the layer.
        gather_again: see `torch_fp8.distributed.tensor_parallel.all_gather.gather_activation`.
    Raises:
        ValueError: the recipe does not support a gathered input; on the CPU also if plain tensors
            have different shapes.
    """
    if not isinstance(x, DTensor):
        if layout.is_shard():
            _check_even(x, mesh, linear)
        x = DTensor.from_local(x, mesh, (layout,), run_check=False)
    (placement,) = x.placements
    if placement.is_partial():
        x = x.redistribute(placements=[Replicate()], async_op=True)
    elif placement.is_shard():
        refuse_gather(linear.fp8.name, linear.fp8.recipe, placement, x.ndim)
        return _Gather.apply(x, linear, gather_again)
    if isinstance(x._local_tensor, AllGatheredFloat8Tensor):
        return x
    dtype = output_dtype(x._local_tensor)
    return x if x.dtype == dtype else _Narrow.apply(x, dtype)


def reduce(output: DTensor, placement: Placement, linear: Float8Linear) -> DTensor:
    """Sum a row-wise layer's outputs; the result is scattered or replicated.

    Backward gathers the gradient of a scattered sum in FP8, as the layer casts it.

    Args:
        output: the partial sums.
        placement: the placement of the sum.
        linear: the layer.
    Raises:
        ValueError: the recipe does not support a gathered gradient.
    """
    if not placement.is_shard():
        return output.redistribute(placements=[placement], async_op=True)
    refuse_gather(linear.fp8.name, linear.fp8.recipe, placement, output.ndim)
    return _Scatter.apply(output, placement, linear)


def refuse_gather(name: str, recipe: Recipe, placement: Placement, ndim: int | None = None) -> None:
    """Raise ValueError if a layer of this recipe cannot multiply an operand gathered in FP8.

    Args:
        name: the layer's qualified name.
        recipe: the layer's recipe.
        placement: the placement of the tensor to be gathered.
        ndim: the tensor's number of dimensions, or None if not known yet.
    """
    way_out = "or give this layer torch's own parallel style, which gathers in 16 bits"
    if recipe.wgrad is None:
        raise ValueError(
            f"FP8 linear '{name}': wgrad='bf16' needs operands never rounded to FP8, but its "
            "parallel style gathers the parts on other ranks in FP8; use wgrad='fp8', "
            f"communication='off', {way_out}"
        )
    last = {-1} if ndim is None else {-1, ndim - 1}
    if placement.dim in last and recipe.input.granularity != "tensorwise":
        raise ValueError(
            f"FP8 linear '{name}': its parallel style gathers features in FP8, and recipe "
            f"{recipe.name!r} has scales that run along them; use recipe 'tensorwise', "
            f"communication='off', {way_out}"
        )


def _gathered(
    x: DTensor, linear: Float8Linear, operand: int, dtype: torch.dtype, gather_again: bool = False
) -> DTensor:
    """Gather a sharded DTensor in FP8, as `linear` casts this operand; it reads as `dtype`."""
    shard = waited(x._local_tensor)
    shards = Shards(x.shape, x.placements[0].dim, x.device_mesh.get_group())
    quantizer = linear.fp8.quantizer(linear, operand, shards.group)
    cast = quantizer.spec, quantizer.shared_scale(shard), dtype
    observed = linear.fp8.observer is not None
    gathered = gather_activation(
        shard, shards, *cast, gather_again=gather_again, keep_part=observed
    )
    return DTensor.from_local(gathered, x.device_mesh, [Replicate()], run_check=False)


class _Gather(torch.autograd.Function):
    """Gather a sharded DTensor in FP8, as a layer casts it; backward scatters the gradient."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, linear: Float8Linear, gather_again: bool) -> DTensor:
        ctx.placements, ctx.dtype = x.placements, x.dtype
        ctx.set_materialize_grads(False)
        return _gathered(x, linear, INPUT, output_dtype(x), gather_again)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:
        if grad is None:
            return None, None, None
        grad = grad.redistribute(placements=ctx.placements, async_op=True)
        return cast(grad, ctx.dtype), None, None


class _Scatter(torch.autograd.Function):
    """Scatter partial sums to a sharded DTensor; backward gathers the gradient in FP8."""

    @staticmethod
    def forward(ctx: Any, output: DTensor, placement: Placement, linear: Float8Linear) -> DTensor:
        ctx.linear = linear
        ctx.set_materialize_grads(False)
        return output.redistribute(placements=[placement], async_op=True)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:
        if grad is None:
            return None, None, None
        if not grad.placements[0].is_shard():
            return grad.redistribute(placements=[Replicate()]), None, None
        return _gathered(grad, ctx.linear, GRAD_OUTPUT, grad.dtype), None, None


class _Narrow(torch.autograd.Function):
    """Convert a replicated DTensor to another dtype, in which backward sums gradients."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dtype: torch.dtype) -> DTensor:
        ctx.dtype = x.dtype
        return x.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        grad = grad.redistribute(placements=[Replicate()], async_op=True)
        return cast(grad, ctx.dtype), None


def _check_even(x: Tensor, mesh: DeviceMesh, linear: Float8Linear) -> None:
    """Refuse plain tensors of different shapes if the check needs no synchronization."""
    if x.device.type != "cpu":
        return
    sizes = torch.tensor(
        [*x.shape, *(-size for size in x.shape)], device=x.device, dtype=torch.int64
    )
    largest = sizes.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
    if not torch.equal(largest[: x.ndim], -largest[x.ndim :]):
        raise ValueError(
            f"FP8 linear '{linear.fp8.name}' got parts with different shapes on the ranks of its "
            f"group ({tuple(x.shape)} on this rank) as plain tensors, which do not record their "
            "position; pass DTensors (use_local_output=False in the style that makes them), or pad "
            "the tokens"
        )
