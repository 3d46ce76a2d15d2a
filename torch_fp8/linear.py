"""`Float8Linear`: a linear layer whose three GEMMs run in FP8.

How it works
============
``nn.Linear`` computes ``y = x w^T + b``. Training it takes three GEMMs, the other two in backward:
``dx = g w`` and ``dw = g^T x``. Here each of them runs on FP8 payloads with scales, as the module's
recipe says (see `torch_fp8.recipe`); bias, and everything between the layers, stays as it is.

The module is an ``nn.Linear`` with another ``__class__``: its parameters are the very same plain
tensors, so optimizers, tying, ``requires_grad`` and ``state_dict`` keys never notice. FP8 exists
only while it is used:

* the weight is cast when a GEMM wants it, with a scale taken from the weight itself, once in
  forward and once, transposed, in backward. What is saved for backward is the Parameter, never a
  payload: nothing can be stale, and FSDP frees what it gathered. (`torch_fp8.weight_cache` keeps
  the payload, by choice; a weight that FSDP2 has gathered in FP8 brings its own;)
* the input is saved for backward as its transposed FP8 payload, 1 byte an element, and only if the
  weight takes a gradient. A frozen layer saves nothing of its input and runs no wgrad; a forward
  without gradients builds nothing for a backward.

Under tensor parallelism all this happens on the rank's own parts of input and weight
(`torch_fp8.local_operands`); an input or a gradient that its group gathers in FP8 brings its
payload along (`torch_fp8.gathered_activation`). So does what a converted norm or MLP hands over,
cast once for all layers that share it (`torch_fp8.produced_activation`).

Delayed scaling keeps a history of amaxes in non-persistent buffers, moved with the module and kept
out of ``state_dict``. It is advanced by forwards in training mode and by backwards; a forward that
activation checkpointing repeats uses the scales of the first.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torch_fp8.activation_gather import group_amax
from torch_fp8.config import FP8Config
from torch_fp8.gathered_activation import GatheredActivation
from torch_fp8.gathered_weight import GatheredWeight
from torch_fp8.gemm import cast, scaled_matmul
from torch_fp8.local_operands import local_operands, plain
from torch_fp8.produced_activation import ProducedActivation
from torch_fp8.produced_activation import plain as plain_activation
from torch_fp8.quantize import QuantizedTensor, quantize_layouts
from torch_fp8.recipe import CastSpec, Recipe
from torch_fp8.scaling import delayed_scale, push_amax, scale_from_amax
from torch_fp8.weight_cache import WeightCache

INPUT, WEIGHT, GRAD_OUTPUT = range(3)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Options(NamedTuple):
    """What the autograd function needs beside tensors."""

    recipe: Recipe
    config: FP8Config
    out_dtype: torch.dtype
    emulate: bool
    save_for_backward: bool
    weight_cache: WeightCache | None
    group: Any


class Float8Linear(nn.Linear):
    """An ``nn.Linear`` whose fprop, dgrad and wgrad GEMMs run in FP8.

    Made by `torch_fp8.convert_to_float8`, which swaps the class of an existing module in place.

    Shapes: input (..., K), weight (N, K), output (..., N); any K, N and number of tokens, zero
    included. The output has autocast's dtype where autocast is on, else the input's.

    Raises:
        TypeError: an input that is not float32, bfloat16 or float16.
    """

    fp8_recipe: Recipe
    fp8_config: FP8Config
    fp8_emulate: bool
    fp8_name: str
    fp8_weight_cache: WeightCache | None = None
    fp8_adds_bias: bool = True
    """False where a parallel style adds it, after its group has summed the output."""

    @property
    def runs_fp8(self) -> bool:
        """Whether a forward runs in FP8 now."""
        return self.training or self.fp8_config.eval_fp8

    def forward(self, input: Tensor) -> Tensor:
        if not self.runs_fp8:
            return super().forward(plain_activation(input))
        if input.dtype not in _DTYPES:
            raise TypeError(
                f"FP8 linear '{self.fp8_name}' takes float32, bfloat16 or float16 input, got "
                f"{input.dtype}; cast it, or keep the module in high precision with "
                f"FP8Config(skip=('{self.fp8_name}',))"
            )
        grad_enabled = torch.is_grad_enabled()
        local = local_operands(input, self.weight, self.fp8_name)
        x, weight = local.input, local.weight
        if x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"FP8 linear '{self.fp8_name}' takes inputs (..., {weight.shape[1]}), got "
                f"{tuple(x.shape)}"
            )
        options = _Options(
            self.fp8_recipe,
            self.fp8_config,
            output_dtype(input),
            self.fp8_emulate,
            grad_enabled,
            self.fp8_weight_cache,
            local.group,
        )
        input_scale, weight_scale, history = None, None, None
        if self.fp8_recipe.delayed:
            if not isinstance(x, GatheredActivation):
                input_scale = self.operand_scale(INPUT, x, local.group)
            weight_scale = self.operand_scale(WEIGHT, weight, local.group)
            history = plain(self.fp8_amax_history)[GRAD_OUTPUT]
        # Compiled with DTensors, torch 2.13 loses views in the function's backward: keep them out.
        rows = x.reshape(-1, weight.shape[1]) if torch.compiler.is_compiling() else x
        output = _Float8LinearFunction.apply(
            rows, weight, input_scale, weight_scale, history, options
        )
        if rows is not x:
            output = output.reshape(*x.shape[:-1], weight.shape[0])
        if self.bias is not None and self.fp8_adds_bias:
            output = output + local.bias(self.bias).to(output.dtype)
        return local.whole(output)

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
            return scale_from_amax(_amax(x, group), spec.format, spec.power_of_two)
        history, last = plain(self.fp8_amax_history)[operand], plain(self.fp8_last_scale)
        if operand == GRAD_OUTPUT:
            return _advance(history, _amax(x, group), spec, self.fp8_config)
        if _in_backward():  # activation checkpointing repeats a forward that was counted already
            return last[operand].clone()
        if isinstance(x, GatheredWeight):  # cast so already, by the same rule
            scale, amax = x.scale, x.amax
            if self.training:
                push_amax(history, amax)
        else:
            amax = _amax(x, group)
            scale = _advance(history, amax, spec, self.fp8_config, move=self.training)
        if self.training:
            last[operand].copy_(scale)
        return scale

    def operand_spec(self, operand: int) -> CastSpec:
        """How the recipe casts INPUT, WEIGHT or GRAD_OUTPUT."""
        recipe = self.fp8_recipe
        return (recipe.input, recipe.weight, recipe.grad_output)[operand]

    def init_scaling(self) -> None:
        """Create the buffers of delayed scaling, if the recipe has them, with empty histories."""
        if not self.fp8_recipe.delayed:
            return
        length, device = self.fp8_config.amax_history_len, self.weight.device
        self.register_buffer(
            "fp8_amax_history", torch.zeros(3, length, device=device), persistent=False
        )
        self.register_buffer("fp8_last_scale", torch.ones(2, device=device), persistent=False)

    def drop_scaling(self) -> None:
        """Remove what `init_scaling` made."""
        for name in ("fp8_amax_history", "fp8_last_scale"):
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "fp8_amax_history" in self._buffers:  # a module on the meta device was materialised
            self.fp8_amax_history.zero_()
            self.fp8_last_scale.fill_(1.0)

    def _apply(self, fn: Any, recurse: bool = True) -> "Float8Linear":
        # Module.to(bfloat16) casts every floating buffer; amaxes follow the device only.
        kept = {n: b for n, b in self._buffers.items() if n.startswith("fp8_") and b is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.fp8_recipe}"


class _Float8LinearFunction(torch.autograd.Function):
    """y = x w^T on FP8 payloads, with dgrad and wgrad likewise.

    x: (..., K); weight: (N, K); input_scale, weight_scale: () float32 or None (from the tensors);
    grad_history: (H,) float32 amaxes of grad_output, written in backward, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        input_scale: Tensor | None,
        weight_scale: Tensor | None,
        grad_history: Tensor | None,
        options: _Options,
    ) -> Tensor:
        recipe = options.recipe
        wants_wgrad = options.save_for_backward and ctx.needs_input_grad[1]
        fp8_wgrad = wants_wgrad and recipe.wgrad is not None
        w_row = _weight_row(weight, weight_scale, options)  # while x may still be on its way
        gathered = isinstance(x, GatheredActivation)
        x_row, x_col = _layouts(
            x, recipe.input, input_scale, row=True, col=fp8_wgrad and not gathered
        )
        assert x_row is not None
        output = scaled_matmul(
            x_row,
            w_row,
            options.out_dtype,
            fast_accum=recipe.fprop.fast_accum,
            emulate=options.emulate,
        )
        if options.save_for_backward:
            # One scale for the whole weight serves both layouts: backward need not look for it.
            w_scale = w_row.scale if w_row.granularity == "tensorwise" else None
            x_kept, x_scale = (None, None) if x_col is None else (x_col.qdata, x_col.scale)
            if gathered and fp8_wgrad:
                x_kept, x_scale = x.keep()
            elif wants_wgrad and x_col is None:
                x_kept = _matrix(x).to(options.out_dtype)
            saved = {
                "weight": weight if ctx.needs_input_grad[0] else None,
                "w_scale": w_scale,
                "x": x_kept,
                "x_scale": x_scale,
            }
            # By name: torch.compile of torch 2.11 shifts saved tensors when one of them is None.
            ctx.saved_names = tuple(name for name, t in saved.items() if t is not None)
            ctx.save_for_backward(*(t for t in saved.values() if t is not None))
            ctx.dtypes = (x.dtype, weight.dtype)
            ctx.options, ctx.grad_history = options, grad_history
            ctx.x_source = x.source if gathered else None
            ctx.input_shape = x.shape
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))
        options: _Options = ctx.options
        recipe, emulate = options.recipe, options.emulate
        wants_dgrad, wants_wgrad = ctx.needs_input_grad[:2]
        fp8_wgrad = wants_wgrad and recipe.wgrad is not None
        w_col = g_scale = g_row = g_col = grad_input = grad_weight = None
        if fp8_wgrad and ctx.x_source is not None:
            ctx.x_source.start(saved["x"], saved.get("x_scale"))
        if wants_dgrad:  # before the gradient is touched, which may still be on its way
            w_col = _weight_col(saved["weight"], saved.get("w_scale"), options)
        if ctx.grad_history is not None and not isinstance(grad_output, GatheredActivation):
            amax = _amax(grad_output, options.group)
            g_scale = _advance(ctx.grad_history, amax, recipe.grad_output, options.config)
        if wants_dgrad or fp8_wgrad:
            g_row, g_col = _layouts(
                grad_output, recipe.grad_output, g_scale, row=wants_dgrad, col=fp8_wgrad
            )
        if g_row is not None:
            assert w_col is not None
            grad_input = scaled_matmul(
                g_row, w_col, ctx.dtypes[0], fast_accum=recipe.dgrad.fast_accum, emulate=emulate
            )
        if g_col is not None:
            assert recipe.wgrad is not None
            if ctx.x_source is None:
                x_col = QuantizedTensor(saved["x"], saved["x_scale"], recipe.wgrad.b.granularity)
            else:
                x_col = ctx.x_source.col(saved["x"], saved.get("x_scale"))
            grad_weight = scaled_matmul(
                g_col, x_col, ctx.dtypes[1], fast_accum=recipe.wgrad.fast_accum, emulate=emulate
            )
        elif wants_wgrad:
            g = _matrix(grad_output)
            grad_weight = cast(g.t() @ saved["x"].to(g.dtype), ctx.dtypes[1])
        if grad_input is not None:
            grad_input = grad_input.view(ctx.input_shape)
        return grad_input, grad_weight, None, None, None, None


def _layouts(
    x: Tensor, spec: CastSpec, scale: Tensor | None, *, row: bool, col: bool
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """x (..., C), as a matrix, and its transpose, as `quantize_layouts`.

    What was gathered in FP8 is cast already; a produced activation is cast by its producer.
    """
    if isinstance(x, GatheredActivation):
        return x.row() if row else None, x.col() if col else None
    if isinstance(x, ProducedActivation):
        return x.layouts(spec, scale, row=row, col=col)
    return quantize_layouts(_matrix(x), spec, scale, row=row, col=col)


def _matrix(x: Tensor) -> Tensor:
    """x (..., C) as (R, C)."""
    if isinstance(x, ProducedActivation):
        return x.production.dense()
    return x.reshape(-1, x.shape[-1])


def _amax(x: Tensor, group: Any) -> Tensor:
    """`group_amax`; a produced activation has its own."""
    return group_amax(x.production.amax() if isinstance(x, ProducedActivation) else x, group)


def _weight_row(weight: Tensor, scale: Tensor | None, options: _Options) -> QuantizedTensor:
    """The weight (N, K), quantized along K: gathered so, kept so, or cast now."""
    if isinstance(weight, GatheredWeight):
        return weight.row()
    if options.weight_cache is not None:
        return options.weight_cache.row(weight, options.recipe.weight)
    row, _ = quantize_layouts(weight, options.recipe.weight, scale, row=True, col=False)
    assert row is not None
    return row


def _weight_col(weight: Tensor, scale: Tensor | None, options: _Options) -> QuantizedTensor:
    """The transposed weight (K, N), quantized along N, likewise."""
    if isinstance(weight, GatheredWeight):
        return weight.col()
    kept = None if options.weight_cache is None else options.weight_cache.col(weight)
    if kept is not None:
        return kept
    _, col = quantize_layouts(weight, options.recipe.weight, scale, row=False, col=True)
    assert col is not None
    return col


def _advance(
    history: Tensor, amax: Tensor, spec: CastSpec, config: FP8Config, *, move: bool = True
) -> Tensor:
    """The () scale of delayed scaling; its history (H,) moves on, if it shall."""
    scale = delayed_scale(history, amax, spec.format, config.amax_compute_algo, config.margin)
    if move:
        push_amax(history, amax)
    return scale


def output_dtype(input: Tensor) -> torch.dtype:
    """What a linear layer returns: autocast's dtype where autocast is on, else the input's."""
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return input.dtype


def _in_backward() -> bool:
    """Whether this forward runs inside a backward pass: the recomputation of a checkpoint."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
