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

from torch_fp8.autograd.checkpoint_pass import repeats_forward, saves_nothing
from torch_fp8.autograd.function import name_of, once_differentiable, refuse_transforms, reshaped
from torch_fp8.config import FP8Config
from torch_fp8.distributed.fsdp.unsharded_weight import GatheredWeight
from torch_fp8.distributed.tensor_parallel.all_gather import GatheredActivation
from torch_fp8.nn.dtensor_layout import local_operands
from torch_fp8.nn.scaling_buffers import (
    BUFFERS,
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    ScalingBuffers,
    history_of,
)
from torch_fp8.nn.weight_cache import WeightCache
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.ops.quantize_delayed import History
from torch_fp8.ops.scaled_mm import cast, scaled_matmul
from torch_fp8.quantization.recipe import CastSpec, Recipe
from torch_fp8.quantization.scaling import delayed_scale, scale_from_amax
from torch_fp8.tensor.lazy_quantized import plain as plain_activation
from torch_fp8.tensor.quantizer import (
    LinearOptions,
    amax_of,
    as_matrix,
    autocast_dtype,
    cast_operand,
    casts_by_history,
    input_stand_ins,
    weight_col,
    weight_row,
)

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
        if dtype not in _DTYPES:
            raise TypeError(
                f"FP8 linear '{self.fp8_name}' takes float32, bfloat16 or float16 input, got "
                f"{dtype}; cast it, or keep the module in high precision with "
                f"FP8Config(skip=('{self.fp8_name}',))"
            )
        name = name_of(self)
        refuse_transforms(name)
        local = local_operands(self, input)
        x, weight = local.input, local.weight
        if weight.dtype not in _DTYPES:
            raise TypeError(
                f"the weight of FP8 linear '{self.fp8_name}' is {weight.dtype}, as model.double() "
                "makes it; FP8 GEMMs take float32, bfloat16 or float16: call model.float(), or "
                "torch_fp8.revert(model) first"
            )
        shape, (num_out, num_in) = x.shape, _matrix_shape(weight, self.fp8_transposed)
        if shape[-1] != num_in:
            raise ValueError(
                f"FP8 linear '{self.fp8_name}' takes inputs (..., {num_in}), got {tuple(shape)}"
            )
        options = LinearOptions(
            name,
            self.fp8_recipe,
            self.fp8_config,
            dtype,
            autocast_dtype(weight.device.type) or dtype,
            self.fp8_emulate,
            torch.is_grad_enabled(),
            self.fp8_weight_cache,
            local.group,
            self.fp8_transposed,
        )
        input_scale, weight_scale, buffers = None, None, (None,) * len(BUFFERS)
        if self.fp8_recipe.delayed:
            if not (isinstance(x, GatheredActivation) or self._moves_history(x, local.group)):
                input_scale = self.operand_scale(INPUT, x, local.group)
            if not self._moves_history(weight, local.group):
                weight_scale = self.operand_scale(WEIGHT, weight, local.group)
            buffers = self.scaling_buffers()
        bias = local.bias(self.bias) if self.bias is not None and self.fp8_adds_bias else None
        # Compiled with DTensors, torch 2.13 loses views in the function's backward: keep them out.
        rows = x.reshape(-1, num_in) if torch.compiler.is_compiling() else x
        output = _Float8LinearFunction.apply(
            rows, weight, bias, input_scale, weight_scale, *buffers, options
        )
        if rows is not x:
            output = output.reshape(*shape[:-1], num_out)
        return local.whole(output)

    def _moves_history(self, x: Tensor, group: Any) -> bool:
        """Whether the cast of an operand itself finds its delayed scale and moves its history."""
        return self.training and casts_by_history(x, group) and not repeats_forward()

    @torch.no_grad()
    def operand_scale(self, operand: int, x: Tensor, group: Any = None) -> Tensor | None:
        """The () scale of an operand; None where its granularity has others.

        With delayed scaling from the operand's history, which moves on in training.

        Args:
            operand: INPUT, WEIGHT or GRAD_OUTPUT.
            x: of this rank.
            group: of ranks with other parts of it, which shall have the same scale; or None.
        """
        spec = self.operand_spec(operand)
        if spec.granularity != "tensorwise":
            return None
        if not spec.delayed:
            return scale_from_amax(amax_of(x, group), spec.format, spec.power_of_two)
        history, config = self._history(operand), self.fp8_config
        if operand == GRAD_OUTPUT:
            return history.advance(amax_of(x, group), spec, config)
        assert history.last is not None
        if repeats_forward():
            return history.last.clone()
        # A gathered weight was cast already, by the same rule.
        amax = x.amax if isinstance(x, GatheredWeight) else amax_of(x, group)
        if self.training:
            return history.advance(amax, spec, config)
        if isinstance(x, GatheredWeight):
            return x.scale
        algorithm, margin = config.amax_compute_algo, config.margin
        return delayed_scale(history.amaxes, amax, spec.format, algorithm, margin)

    def producer_history(self, operand: int) -> History | None:
        """The history of INPUT or GRAD_OUTPUT, if a producer may cast for it now with its scale.

        Not where a group of ranks agrees on one, nor where a forward runs again with the last.
        """
        frozen = not self.training or repeats_forward()
        if not self.fp8_recipe.delayed or isinstance(self.weight, DTensor):
            return None
        return None if operand == INPUT and frozen else self._history(operand)

    def _history(self, operand: int) -> History:
        return history_of(self.scaling_buffers(), operand)

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


class _Float8LinearFunction(torch.autograd.Function):
    """y = x w^T on FP8 payloads, with dgrad and wgrad likewise.

    x: (..., K); weight: (N, K), or (K, N) as the options say; bias: (N,) or None; input_scale,
    weight_scale: () float32 or None (from the tensors, or with delayed scaling from their
    histories, which are written then);
    amaxes, progress, last, grad_amaxes, grad_progress: see `BUFFERS`, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        input_scale: Tensor | None,
        weight_scale: Tensor | None,
        amaxes: Tensor | None,
        progress: Tensor | None,
        last: Tensor | None,
        grad_amaxes: Tensor | None,
        grad_progress: Tensor | None,
        options: LinearOptions,
    ) -> Tensor:
        recipe, shape = options.recipe, x.shape
        wants_wgrad = options.save_for_backward and ctx.needs_input_grad[1]
        fp8_wgrad = wants_wgrad and recipe.wgrad is not None
        of_input = of_weight = of_grad = None
        if amaxes is not None:
            buffers = (amaxes, progress, last, grad_amaxes, grad_progress)
            of_input, of_weight, of_grad = (history_of(buffers, i) for i in range(3))
        # The weight first, while x may still be on its way.
        w_row = weight_row(weight, weight_scale, of_weight, options)
        gathered = isinstance(x, GatheredActivation)
        dropped = wants_wgrad and not gathered and saves_nothing()
        x_row, x_col, _ = cast_operand(
            x,
            recipe.input,
            of_input if input_scale is None else input_scale,
            options,
            row=True,
            col=fp8_wgrad and not gathered and not dropped,
        )
        assert x_row is not None
        output = scaled_matmul(
            x_row,
            w_row,
            options.out_dtype,
            bias=bias,
            fast_accum=recipe.fprop.fast_accum,
            emulate=options.emulate,
        )
        if options.save_for_backward:
            # One scale for the whole weight serves both layouts: backward need not look for it.
            w_scale = w_row.scale if w_row.granularity == "tensorwise" else None
            x_kept, x_scale = (None, None) if x_col is None else (x_col.qdata, x_col.scale)
            if dropped:
                x_kept, x_scale = input_stand_ins(x, x_row, fp8_wgrad, options.out_dtype)
            elif gathered and fp8_wgrad:
                x_kept, x_scale = x.keep()
            elif wants_wgrad and x_col is None:
                x_kept = as_matrix(x).to(options.out_dtype)
            saved = {
                "weight": weight if ctx.needs_input_grad[0] else None,
                "w_scale": w_scale,
                "x": x_kept,
                "x_scale": x_scale,
            }
            # By name: torch.compile of torch 2.11 shifts saved tensors when one of them is None.
            kept = {name: t for name, t in saved.items() if t is not None}
            ctx.saved_names = tuple(kept)
            ctx.save_for_backward(*kept.values())
            ctx.dtypes = (options.dtype, weight.dtype, None if bias is None else bias.dtype)
            ctx.options, ctx.name, ctx.grad_history = options, options.name, of_grad
            ctx.x_source = x.source if gathered else None
            ctx.input_shape = shape
        return reshaped(output, (*shape[:-1], output.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))
        options: LinearOptions = ctx.options
        recipe, emulate = options.recipe, options.emulate
        wants_dgrad, wants_wgrad = ctx.needs_input_grad[:2]
        fp8_wgrad = wants_wgrad and recipe.wgrad is not None
        sum_dtype = ctx.dtypes[2] if ctx.needs_input_grad[2] else None
        w_col = grad_input = grad_weight = None
        if fp8_wgrad and ctx.x_source is not None:
            ctx.x_source.start(saved["x"], saved.get("x_scale"))
        if wants_dgrad:  # before the gradient is touched, which may still be on its way
            w_col = weight_col(saved["weight"], saved.get("w_scale"), options, grad_output)
        scale, g_gathered = ctx.grad_history, isinstance(grad_output, GatheredActivation)
        if not (scale is None or casts_by_history(grad_output, options.group) or g_gathered):
            amax = amax_of(grad_output, options.group)
            scale = scale.advance(amax, recipe.grad_output, options.config)
        g_row, g_col, grad_bias = cast_operand(
            grad_output,
            recipe.grad_output,
            scale,
            options,
            row=wants_dgrad,
            col=fp8_wgrad,
            sum_dtype=sum_dtype,
        )
        if g_row is not None:
            assert w_col is not None
            grad_input = scaled_matmul(
                g_row, w_col, ctx.dtypes[0], fast_accum=recipe.dgrad.fast_accum, emulate=emulate
            ).view(ctx.input_shape)
        if g_col is not None:
            assert recipe.wgrad is not None
            if ctx.x_source is None:
                x_col = QuantizedTensor(saved["x"], saved["x_scale"], recipe.wgrad.b.granularity)
            else:
                x_col = ctx.x_source.col(saved["x"], saved.get("x_scale"))
            a, b = (x_col, g_col) if options.transposed else (g_col, x_col)
            tokens, fast_accum = ctx.input_shape[:-1].numel(), recipe.wgrad.fast_accum
            grad_weight = scaled_matmul(
                a, b, ctx.dtypes[1], tokens, fast_accum=fast_accum, emulate=emulate
            )
        elif wants_wgrad:
            g = as_matrix(grad_output)
            kept = saved["x"].to(g.dtype)
            product = kept.t() @ g if options.transposed else g.t() @ kept
            grad_weight = cast(product, ctx.dtypes[1])
        return grad_input, grad_weight, grad_bias, *[None] * 8


def _matrix_shape(weight: Tensor, transposed: bool) -> tuple[int, int]:
    rows, cols = weight.shape
    return (cols, rows) if transposed else (rows, cols)
