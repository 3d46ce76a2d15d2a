"""`Float8Linear`: a linear layer whose three GEMMs run in FP8.

How it works
============
``nn.Linear`` computes ``y = x w^T + b``. Training it takes three GEMMs, the other two in backward:
``dx = g w`` and ``dw = g^T x``. Here each of them runs on FP8 payloads with scales, as the module's
recipe says (see `torch_fp8.quantization.recipe`); everything between the layers stays as it is. The
bias is added where the GEMM is rounded, and its gradient added up by the cast that reads g anyway.

The module is an ``nn.Linear`` with another ``__class__``: its parameters are the very same plain
tensors, so optimizers, tying, ``requires_grad`` and ``state_dict`` keys never notice. FP8 exists
only while it is used:

* the weight is cast when a GEMM wants it, with a scale taken from the weight itself, once in
  forward and once, transposed, in backward. What is saved for backward is the Parameter, never a
  payload: nothing can be stale, and FSDP frees what it gathered. (`torch_fp8.nn.weight_cache` keeps
  the payload, by choice; a weight that FSDP2 has gathered in FP8 brings its own;)
* the input is saved for backward as its transposed FP8 payload, 1 byte an element, and only if the
  weight takes a gradient. A frozen layer saves nothing of its input and runs no wgrad; a forward
  without gradients builds nothing for a backward.

Under tensor parallelism all this happens on the rank's own parts of input and weight
(`torch_fp8.nn.dtensor_layout`); an input or a gradient that its group gathers in FP8 brings its
payload along (`torch_fp8.distributed.tensor_parallel.all_gather`). So does what a converted norm or
MLP hands over, cast once for all layers that share it (`torch_fp8.tensor.lazy_quantized`).

Delayed scaling keeps a history of amaxes in non-persistent buffers, moved with the module and kept
out of ``state_dict``. It is advanced by forwards in training mode and by backwards; a forward that
activation checkpointing repeats uses the scales of the first, which saves nothing and makes no
transposed payload (`torch_fp8.autograd.checkpoint_pass`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.checkpoint_pass import repeats_forward
from torch_fp8.autograd.function import name_of, refuse_transforms
from torch_fp8.config import FP8Config
from torch_fp8.nn.dtensor_layout import local_operands
from torch_fp8.nn.linear_function import LinearOptions, linear
from torch_fp8.nn.scaling_buffers import ScalingBuffers
from torch_fp8.nn.weight_cache import WeightCache
from torch_fp8.ops.quantize_delayed import History
from torch_fp8.quantization.recipe import CastSpec, Recipe
from torch_fp8.tensor.lazy_quantized import plain as plain_activation
from torch_fp8.tensor.quantizer import Quantizer, Quantizers, WeightQuantizer, autocast_dtype

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Float8Layer(ScalingBuffers):
    """The part of a linear layer that runs its fprop, dgrad and wgrad GEMMs in FP8.

    It stands in front of a class that has ``weight`` and ``bias`` (see `Float8Linear`).

    Shapes: input (..., K), weight (N, K), output (..., N); any K, N and number of tokens, zero
    included. The output has autocast's dtype where autocast is on, else the input's.

    Raises:
        TypeError: an input that is not float32, bfloat16 or float16.
    """

    bias: nn.Parameter | None
    in_features: int
    out_features: int
    fp8_emulate: bool
    fp8_name: str
    fp8_weight_cache: WeightCache | None = None
    fp8_adds_bias: bool = True
    """False where a parallel style adds it, after its group has summed the output."""
    fp8_transposed: bool = False
    """Whether the weight is stored as (K, N)."""

    @property
    def runs_fp8(self) -> bool:
        """Whether a forward runs in FP8 now."""
        return self.training or self.fp8_config.eval_fp8

    def forward(self, input: Tensor) -> Tensor:
        if not self.runs_fp8:
            output: Tensor = super().forward(plain_activation(input))
            return output
        dtype = input.dtype  # asked once: a produced activation answers in Python
        local = local_operands(self, input)
        x, weight = local.input, local.weight
        self._check(x, weight, dtype)
        name = name_of(self)
        refuse_transforms(name)
        options = LinearOptions(
            name,
            self.fp8_recipe,
            self.quantizers(local.group),
            dtype,
            autocast_dtype(weight.device.type) or dtype,
            self.fp8_emulate,
        )
        buffers = self.scaling_buffers() if self.fp8_recipe.delayed else ()
        bias = local.bias(self.bias) if self.bias is not None and self.fp8_adds_bias else None
        if not torch.compiler.is_compiling():
            return local.whole(linear(x, weight, bias, options, *buffers))
        # Compiled with DTensors, torch 2.13 loses views in the function's backward: keep them out.
        rows = linear(x.reshape(-1, x.shape[-1]), weight, bias, options, *buffers)
        return local.whole(rows.reshape(*x.shape[:-1], rows.shape[-1]))

    def _check(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
        if dtype not in _DTYPES:
            raise TypeError(
                f"FP8 linear '{self.fp8_name}' takes float32, bfloat16 or float16 input, got "
                f"{dtype}; cast it, or keep the module in high precision with "
                f"FP8Config(skip=('{self.fp8_name}',))"
            )
        if weight.dtype not in _DTYPES:
            raise TypeError(
                f"the weight of FP8 linear '{self.fp8_name}' is {weight.dtype}, as model.double() "
                "makes it; FP8 GEMMs take float32, bfloat16 or float16: call model.float(), or "
                "torch_fp8.revert(model) first"
            )
        features = weight.shape[0 if self.fp8_transposed else 1]
        if x.shape[-1] != features:
            raise ValueError(
                f"FP8 linear '{self.fp8_name}' takes inputs (..., {features}), got {tuple(x.shape)}"
            )

    def quantizers(self, group: Any = None) -> Quantizers:
        """How the operands are cast now.

        Args:
            group: of ranks that have other parts of them; or None.
        """
        recipe, config = self.fp8_recipe, self.fp8_config
        updates, repeats = True, False
        if recipe.delayed:
            updates, repeats = self.training, repeats_forward()
        weight = Quantizer(recipe.weight, config, group, None, updates, repeats)
        return Quantizers(
            Quantizer(recipe.input, config, group, None, updates, repeats),
            WeightQuantizer(weight, self.fp8_weight_cache, self.fp8_transposed),
            Quantizer(recipe.grad_output, config, group),
        )

    def quantizer(self, operand: int, group: Any = None) -> Quantizer:
        """That of INPUT, WEIGHT or GRAD_OUTPUT, with its history."""
        buffers = self.scaling_buffers() if self.fp8_recipe.delayed else ()
        made = self.quantizers(group).with_buffers(buffers)
        return (made.input, made.weight.quantizer, made.grad_output)[operand]

    def producer_history(self, operand: int) -> History | None:
        """The history of INPUT or GRAD_OUTPUT, if a producer may cast for it now with its scale.

        Not where a group of ranks agrees on one, nor where a forward runs again with the last.
        """
        if not self.fp8_recipe.delayed or isinstance(self.weight, DTensor):
            return None
        quantizer = self.quantizer(operand)
        return quantizer.history if quantizer.casts_by_history else None

    def operand_spec(self, operand: int) -> CastSpec:
        """How the recipe casts INPUT, WEIGHT or GRAD_OUTPUT."""
        recipe = self.fp8_recipe
        return (recipe.input, recipe.weight, recipe.grad_output)[operand]

    def configure(self, name: str, config: FP8Config, recipe: Recipe, emulate: bool) -> None:
        """Run `recipe` from now on, with what it remembers empty.

        Args:
            name: qualified, for errors.
            config, recipe: what was asked for, and what that is here.
            emulate: run its GEMMs through the reference path.
        """
        self.fp8_config, self.fp8_recipe = config, recipe
        self.fp8_emulate, self.fp8_name = emulate, name
        self.init_scaling()

    def drop_scaling(self) -> None:
        """Remove what `init_scaling` made, and what is kept of the weight as it was cast."""
        super().drop_scaling()
        self.__dict__.pop("fp8_weight_cache", None)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.fp8_recipe}"


class Float8Linear(Float8Layer, nn.Linear):
    """An ``nn.Linear`` whose fprop, dgrad and wgrad GEMMs run in FP8, see `Float8Layer`.

    Made by `torch_fp8.convert_to_float8`, which swaps the class of an existing module in place.
    """

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_scaling()


def _matrix_shape(weight: Tensor, transposed: bool) -> tuple[int, int]:
    rows, cols = weight.shape
    return (cols, rows) if transposed else (rows, cols)
