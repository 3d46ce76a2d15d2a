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
  payload: nothing can be stale, and FSDP frees what it gathered. (`torch_fp8.tensor.payload_cache`
  says which weights may keep one; a weight that FSDP2 has gathered in FP8 brings its own;)
* the input is saved for backward as its transposed FP8 payload, 1 byte an element, and only if the
  weight takes a gradient. A frozen layer saves nothing of its input and runs no wgrad; a forward
  without gradients builds nothing for a backward.

Under tensor parallelism all this happens on the rank's own parts of input and weight
(`torch_fp8.nn.dtensor_layout`); an input or a gradient that its group gathers in FP8 brings its
payload along (`torch_fp8.distributed.tensor_parallel.all_gather`). So does what a converted norm or
MLP hands over, cast once for all layers that share it (`torch_fp8.tensor.lazy_quantized`).

Delayed scaling keeps a history of amaxes in non-persistent buffers, moved with the module and kept
out of ``state_dict``. Forwards in training mode and backwards record amaxes, the optimizer's step
renews the scales (`torch_fp8.nn.delayed_scaling`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from torch_fp8.autograd.current_pass import RunsFP8, is_transformed
from torch_fp8.autograd.function import as_text
from torch_fp8.config import FP8Config
from torch_fp8.nn.layer_quantizers import NOT_PLAIN
from torch_fp8.nn.linear_function import (
    LinearOptions,
    linear,
    linear_in_graph,
    served_in_graph,
)
from torch_fp8.nn.repeated_forward import FLOATS, RepeatedForward
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.lazy_quantized import plain as plain_activation
from torch_fp8.tensor.quantizer import autocast_dtype


class Float8Layer(RepeatedForward, RunsFP8):
    """The part of a linear layer that runs its fprop, dgrad and wgrad GEMMs in FP8.

    It stands in front of a class that has ``weight`` and ``bias`` (see `Float8Linear`).

    Shapes: input (..., K), weight (N, K), output (..., N); any K, N and number of tokens, zero
    included. The output has autocast's dtype where autocast is on, else the input's.

    Raises:
        TypeError: an input that is not float32, bfloat16 or float16.
    """

    in_features: int
    out_features: int
    fp8_name: str
    fp8_casts: str
    """How operands are cast, for `linear_in_graph`."""
    fp8_adds_bias: bool = True
    """False where a parallel style adds it, after its group has summed the output."""

    @property
    def fp8_weights(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def forward(self, input: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if not self.runs_fp8 or (not compiling and is_transformed()):
            return self._in_high_precision(plain_activation(input))
        if input.is_nested:
            return self._of_jagged(input)
        if compiling and not (isinstance(input, NOT_PLAIN) or isinstance(self.weight, NOT_PLAIN)):
            return self._in_graph(input)
        if not (compiling or torch.is_grad_enabled()):
            again = self.repeated(input)
            if again is not None:
                return again
        operands = self.operands(input)
        x, weight = operands.input, operands.weight
        bias = operands.bias(self.bias) if self.fp8_adds_bias else None
        shape, dtype = x.shape, x.dtype  # asked once: a produced activation answers in Python
        self._check(shape, dtype, weight)
        name = "" if compiling else self.fp8_name  # as `name_of`
        quantizers = self.quantizers(operands.group)
        out_dtype = autocast_dtype(weight.device.type) or dtype
        options = LinearOptions(
            name,
            dtype,
            out_dtype,
            self.fp8_recipe,
            quantizers,
            self.fp8_emulate,
            self.training,
            compiling and self.fp8_ready,
        )
        if not compiling:
            return operands.whole(linear(x, weight, bias, shape, options))
        # torch 2.13 loses views in the backward of a function with sharded tensors: none go in.
        rows = x.reshape(-1, shape[-1])
        y = linear(rows, weight, bias, rows.shape, options, *self.graph_buffers())
        return operands.whole(y.reshape(*shape[:-1], y.shape[-1]))

    def _of_jagged(self, input: Tensor) -> Tensor:
        """Run on the tokens of all sequences, (sum of lengths, K), of a jagged nested tensor."""
        if input.layout != torch.jagged or getattr(input, "_ragged_idx", 1) != 1 or input.ndim != 3:
            return self._in_high_precision(input)
        output = self.forward(input.values())
        return torch.nested.nested_tensor_from_jagged(output, input.offsets(), input.lengths())

    def _in_high_precision(self, x: Tensor) -> Tensor:
        """What `forward` does where it does not run in FP8, with a weight of any dtype."""
        if self.fp8_thawed_recipe is not None or _is_mixed(x, self.weight):
            return self.dequantized_forward(x)
        output: Tensor = super().forward(x)
        return output

    def _in_graph(self, x: Tensor) -> Tensor:
        """What `forward` does with plain tensors in a graph of torch.compile."""
        self._check(x.shape, x.dtype, self.weight)
        bias, ready = self.bias if self.fp8_adds_bias else None, False
        buffers: tuple[Any, ...] = ()
        if self.fp8_delayed:
            own, ready = self._buffers, self.fp8_ready
            buffers = own["fp8_scales"], own["fp8_amaxes"], own["fp8_grad_amax"]
        if not self.training and not torch.is_grad_enabled() and self.fp8_served is not None:
            served: Tensor = served_in_graph(
                x, *self.fp8_served, bias, (self.fp8_casts, ready), *buffers
            )
            return served
        casts = self.fp8_casts, ready, self.training
        y: Tensor = linear_in_graph(x, self.weight, bias, casts, *buffers)
        return y

    def _check(self, shape: torch.Size, dtype: torch.dtype, weight: Tensor) -> None:
        if dtype not in FLOATS:
            raise TypeError(
                f"FP8 linear '{self.fp8_name}' takes float32, bfloat16 or float16 input, got "
                f"{dtype}; cast it, or keep the module in high precision with "
                f"FP8Config(skip=('{self.fp8_name}',))"
            )
        if weight.dtype not in FLOATS:
            raise TypeError(
                f"the weight of FP8 linear '{self.fp8_name}' is {weight.dtype}, as model.double() "
                "makes it; FP8 GEMMs take float32, bfloat16 or float16: call model.float(), or "
                "torch_fp8.revert(model) first"
            )
        features = weight.shape[0 if self.fp8_transposed else 1]
        if shape[-1] != features:
            raise ValueError(
                f"FP8 linear '{self.fp8_name}' takes inputs (..., {features}), got {tuple(shape)}"
            )

    def configure(self, name: str, config: FP8Config, recipe: Recipe, emulate: bool) -> None:
        """Run `recipe` from now on, with what it remembers empty.

        Args:
            name: qualified, for errors.
            config, recipe: what was asked for, and what that is here.
            emulate: run its GEMMs through the reference path.
        """
        self.fp8_config, self.fp8_recipe = config, recipe
        self.fp8_emulate, self.fp8_name, self.fp8_delayed = emulate, name, recipe.delayed
        # Of the class, but a graph guards on every base class before the one that has it.
        self.fp8_transposed = type(self).fp8_transposed
        self.fp8_casts = as_text((recipe, self.fp8_transposed, emulate))
        self.init_scaling()

    def extra_repr(self) -> str:
        frozen = "" if self.frozen_weight is None else ", frozen"
        return f"{super().extra_repr()}, fp8={self.fp8_recipe}{frozen}"


def _is_mixed(x: Any, weight: Tensor) -> bool:
    """Whether torch's own product refuses these dtypes; x may be the proxy of a tracer."""
    if not isinstance(x, Tensor) or x.dtype == weight.dtype:
        return False
    return autocast_dtype(x.device.type) is None


class Float8Linear(Float8Layer, nn.Linear):
    """An ``nn.Linear`` whose fprop, dgrad and wgrad GEMMs run in FP8, see `Float8Layer`.

    Made by `torch_fp8.convert_to_float8`, which swaps the class of an existing module in place.
    """

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_scaling()
