"""`SharedOutput`: a norm of another kind, whose output FP8 layers cast once for all of them."""

from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.activation_checkpointing import PLAIN
from torch_fp8.autograd_function import name_of
from torch_fp8.module_class import add_mixin, remove_mixin
from torch_fp8.produced_activation import ProducedActivation, Production
from torch_fp8.quantize import quantize_layouts
from torch_fp8.scaling import tensor_amax


class SharedOutput(nn.Module):
    """The part of such a norm that goes in front of its own class; its output is what it was."""

    fp8_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return shared(output, name_of(self)) if isinstance(output, Tensor) else output


def share_output(module: nn.Module, name: str) -> bool:
    """Make a LayerNorm, Hugging Face's own ones included, share its output, in place.

    Known by one weight (C,), maybe a bias, and "LayerNorm" in its class's name, of which there are
    too many for a list. False, and nothing done, if it is none.
    """
    if not isinstance(module, SharedOutput):
        weight = module._parameters.get("weight")
        is_norm = weight is not None and weight.ndim == 1 and "LayerNorm" in type(module).__name__
        if not is_norm or module._modules or "forward" in module.__dict__:
            return False
        add_mixin(module, SharedOutput)
        assert isinstance(module, SharedOutput)
    module.fp8_name = name
    return True


def keep_output(module: SharedOutput) -> None:
    """Undo `share_output`."""
    del module.fp8_name
    remove_mixin(module, SharedOutput)


def shared(x: Tensor, name: str) -> Tensor:
    """x (..., C), a plain tensor, as an activation that several layers read: it is cast once.

    Args:
        x: anything else is returned as it is.
        name: of the module whose layers share it.
    """
    if type(x) not in PLAIN or torch.compiler.is_compiling():
        return x
    output: Tensor = _Shared.apply(x, name)
    return output


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        matrix = x.detach().reshape(-1, x.shape[-1])
        production = Production(
            name,
            (matrix,),
            lambda: matrix,
            lambda spec, scale, row, col: quantize_layouts(matrix, spec, scale, row=row, col=col),
            lambda: tensor_amax(matrix),
        )
        return ProducedActivation(production, x.shape, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
