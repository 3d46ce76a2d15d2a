"""`Float8Linear`: a linear layer whose three GEMMs run in FP8.

How it works
============
``nn.Linear`` computes ``y = x w^T + b`` by one GEMM, and backward runs two more: ``dx = g w`` and
``dw = g^T x``. This layer runs each of them on FP8 payloads with scales, as the recipe says
(`torch_fp8.quantization.recipe`). The GEMM adds the bias before it rounds its result, and the cast
of g also sums the gradient of the bias.

The module is an ``nn.Linear`` with another ``__class__``. Its parameters are the same plain
tensors, so optimizers, tying, ``requires_grad`` and ``state_dict`` keys need no change. FP8
payloads exist only while they are needed:

* Each GEMM casts the weight that it reads, with a scale computed from the weight: once in forward
  and once, transposed, in backward. Autograd saves the Parameter, never a payload, so that no
  payload can be out of date and FSDP can free the gathered weight. Exceptions: weights that may
  keep a payload (`torch_fp8.tensor.payload_cache`), and weights that FSDP2 gathered in FP8.
* Autograd saves the input as its transposed FP8 payload, 1 byte per element, and only if the weight
  needs a gradient. A frozen layer saves nothing of its input and runs no wgrad. A forward without
  gradients prepares nothing for backward.

Under tensor parallelism, each rank does this with its parts of input and weight
(`torch_fp8.nn.dtensor_layout`). An input or a gradient that its group gathered in FP8 already has
its payload (`torch_fp8.distributed.tensor_parallel.all_gather`), and so has the output of a
converted norm or MLP, which is cast once for all layers that read it
(`torch_fp8.tensor.lazy_quantized`).

Delayed scaling keeps a history of amaxes in non-persistent buffers, which move with the module and
are not in ``state_dict``. Forwards in training mode and backwards record amaxes; the optimizer's
step computes new scales (`torch_fp8.nn.delayed_scaling`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd import current_pass
from torch_fp8.autograd.current_pass import (
    autocast_dtype,
    is_transformed,
    note_graph,
    warn_of_halves_in_program,
)
from torch_fp8.config import FP8Config
from torch_fp8.nn.delayed_scaling import note_trace, pushed_history, restore_scales
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.nn.input_group import (
    graph_operands,
    member_in_graph,
    member_output,
    shared_by_readers,
)
from torch_fp8.nn.layer_fp8 import LayerFP8, check_input
from torch_fp8.nn.linear_function import linear, linear_in_graph
from torch_fp8.nn.repeated_forward import repeated, served_in_graph
from torch_fp8.nn.scale_buffers import BUFFERS, graph_buffers, scaling_buffers
from torch_fp8.nn.scaling_rule import scales_of
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor, plain
from torch_fp8.tensor.split_weight import SplitWeight, scales_of_block

_NOT_PLAIN = (DTensor, QuantizableTensor)
"""Tensor subclasses that have to be unwrapped before torch.compile traces the GEMM."""


class Float8Layer(FrozenStorage):
    """Mixin that runs the fprop, dgrad and wgrad GEMMs of a linear layer in FP8.

    It precedes a class with ``weight`` and ``bias`` in the MRO (see `Float8Linear`).

    Shapes: input (..., K), weight (N, K), output (..., N), for any K, N and number of tokens,
    including zero. The output has autocast's dtype if autocast is on, else the input's.

    Raises:
        TypeError: the input is not float32, bfloat16 or float16, or not dense.
        ValueError: the last dimension of the input is not K, or it is on another device.
    """

    in_features: int
    out_features: int
    fp8: LayerFP8
    fp8_adds_bias: bool = True
    """False if a parallel style adds the bias, after its group has summed the output."""
    fp8_transposed: bool = False
    """Whether the weight is stored as (K, N)."""
    _fp8_class: type[LayerFP8] = LayerFP8

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(
            f"{type(self).__name__} cannot be created directly: torch_fp8.convert_to_float8(model) "
            "turns existing layers, such as nn.Linear(in_features, out_features), into FP8 layers"
        )

    @property
    def runs_fp8(self) -> bool:
        fp8 = self.fp8  # `current_pass.is_exporting` without a call
        if current_pass.requested or torch.compiler._is_exporting_flag or fp8.paused:
            return False
        return self.training or fp8.config.eval_fp8

    def forward(self, input: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if not self.runs_fp8 or (not compiling and is_transformed()):
            return self._in_high_precision(plain(input))
        if not isinstance(input, Tensor) or input.is_nested or input.layout is not torch.strided:
            return self._of_other_layout(input)
        if compiling:
            return _in_graph(self, input)
        has_graph = torch.is_grad_enabled()
        if not has_graph:
            output = repeated(self, input)
            if output is not None:
                return output
        is_lazy = type(input) is LazyQuantizedTensor
        is_member = has_graph and self.fp8.group is not None
        if is_member and not is_lazy:
            input = shared_by_readers(input, self.fp8.name)
            is_lazy = type(input) is LazyQuantizedTensor
        operands = self.fp8.operands(self, input)
        options = self.fp8.options(self, operands)
        output = member_output(self, operands, options) if is_member and is_lazy else None
        if output is None:
            output = linear(*operands[:4], options)
        return output if operands.parts is None else operands.output(output)

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            f"torch.jit.script cannot compile {self.fp8.name or 'a layer'}, which runs in FP8. "
            "Make it a stock layer again, or script a copy of the model: "
            "torch.jit.script(stock), after stock = copy.deepcopy(model); torch_fp8.revert(stock)"
        )

    def _of_other_layout(self, input: Tensor) -> Tensor:
        """Run on a nested tensor; a jagged one's values (sum of lengths, K) are one batch."""
        name = self.fp8.name
        if not isinstance(input, Tensor):
            raise TypeError(f"FP8 linear '{name}' takes a tensor, got {type(input).__name__}")
        if not input.is_nested:
            raise TypeError(
                f"FP8 linear '{name}' takes dense inputs, got {input.layout}; call "
                f"input.to_dense(), or keep the module in high precision with "
                f"FP8Config(skip=('{name}',))"
            )
        if input.layout != torch.jagged or input.ndim != 3 or isinstance(input.shape[1], int):
            return self._in_high_precision(input)
        output = self.forward(input.values())
        return torch.nested.nested_tensor_from_jagged(output, input.offsets(), input.lengths())

    def _in_high_precision(self, x: Tensor) -> Tensor:
        """Compute `forward` in high precision, with a weight of any dtype."""
        if not torch.compiler.is_compiling():
            self.fp8.called = True
        if isinstance(self.weight, SplitWeight):
            warn_of_halves_in_program()
        if self.fp8.frozen is not None or _is_mixed(x, self.weight):
            return self.dequantized_forward(x)
        return super().forward(x)

    # ---- conversion, and what a layer remembers --------------------------------------------------

    def configure(self, name: str, config: FP8Config, recipe: Recipe, emulate: bool) -> None:
        """Run `recipe` from now on, with new, empty state.

        Args:
            name: qualified name, for errors.
            config: the layer's configuration.
            recipe: recipe that `config` resolves to on this device.
            emulate: whether GEMMs run through the reference path.
        """
        frozen = self.drop_fp8()
        self.fp8 = self._fp8_class(name, config, recipe, emulate, self.fp8_transposed, frozen)
        if self.fp8.scaling is not None:
            self.fp8.scaling.start(self)

    def run_recipe(self, recipe: Recipe, emulate: bool) -> None:
        self.configure(self.fp8.name, self.fp8.config, recipe, emulate)

    def run_forward(self, recipe: Recipe) -> None:
        """Run `recipe`, which differs only in `bf16_forward`, with the existing state."""
        self.fp8.payloads.forget()
        self.fp8.recipe = recipe
        self.fp8.run_emulated(self.fp8.emulate)

    def drop_fp8(self) -> Any:
        """Delete the state that `configure` added; return the frozen weight's state, or None."""
        fp8: LayerFP8 | None = self.__dict__.pop("fp8", None)
        if fp8 is None:
            return None
        if fp8.scaling is not None:
            fp8.scaling.stop(self)
        return fp8.frozen

    def restart(self) -> None:
        """Run the same recipe with new, empty state."""
        self.run_recipe(self.fp8.recipe, self.fp8.emulate)

    def reset_scaling(self) -> None:
        """Empty the histories of delayed scaling."""
        if self.fp8.scaling is not None:
            self.fp8.scaling.reset(self)

    @property
    def scaling_state(self) -> tuple[Tensor, Tensor]:
        """Amax history (3, H) of delayed scaling, newest first; scales of input and weight (2,).

        The history includes what was recorded since the optimizer's last step.
        """
        history = pushed_history(self)
        return history, scales_of(self, history[None])[0, :2]

    def load_scaling_state(self, history: Tensor, last_scale: Tensor) -> None:
        """Restore a `scaling_state`; the scales are computed from `history`."""
        self.reset_scaling()
        scaling_buffers(self)[0].copy_(history)
        if history.any():
            assert self.fp8.scaling is not None
            self.fp8.scaling.known = self.fp8.scaling.ready = True
            restore_scales([self])

    # ---- what torch asks of a module -------------------------------------------------------------

    def train(self, mode: bool = True) -> "Float8Layer":
        if mode:
            self.fp8.payloads.forget()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.fp8.release()  # device or dtype may change now
        before = {n: b for n in BUFFERS if (b := getattr(self, n, None)) is not None}
        super()._apply(fn, recurse)
        if self.fp8.scaling is not None:
            self.fp8.scaling.after_move(self, before)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        scaling = self.fp8.scaling
        if scaling is None or self.weight.is_meta:
            return
        before = {name: getattr(self, name) for name in BUFFERS}
        if any(buffer.is_meta for buffer in before.values()):
            # assign=True has replaced the weight and left the buffers on meta.
            scaling.after_move(self, before, self.weight.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.fp8.scaling is not None:
            self.fp8.scaling.track(self)

    def extra_repr(self) -> str:
        frozen = "" if self.frozen_weight is None else ", frozen"
        return f"{super().extra_repr()}, fp8={self.fp8.recipe}{frozen}"


def _in_graph(layer: Float8Layer, x: Tensor) -> Tensor:
    """Compute `Float8Layer.forward` in a graph of torch.compile.

    This is a function because the graph would guard on each method that it calls.
    """
    note_graph()
    fp8, weight = layer.fp8, layer.weight
    buffers: tuple[Any, ...] = ()
    if fp8.scaling is not None and not fp8.scales_known:
        note_trace(layer.fp8_grad_amax)
    if isinstance(x, _NOT_PLAIN) or isinstance(weight, _NOT_PLAIN):
        operands = fp8.operands(layer, x)
        if fp8.scaling is not None:
            _, scales, slots = scaling_buffers(layer)
            buffers = None, scales if fp8.scaling.ready else None, *slots
        shape = operands.shape
        # torch 2.13 loses views in the backward of a function with sharded tensors: pass none.
        rows = operands.input.reshape(-1, shape[-1])  # (M, K)
        tensors = rows, operands.weight, operands.bias, rows.shape
        y = linear(*tensors, fp8.new_options(layer, operands), *buffers)
        return operands.output(y.reshape(*shape[:-1], y.shape[-1]))  # (M, N) -> (..., N)
    check_input(fp8, x, weight)
    bias = layer.bias if layer.fp8_adds_bias else None
    casts = fp8.casts, layer.training
    if fp8.group is not None and torch.is_grad_enabled() and x.requires_grad:
        i, num, shared = graph_operands(layer)
        if shared:
            return member_in_graph(x, i, num, casts, *shared)
    if fp8.scaling is not None:
        buffers = graph_buffers(layer)
    if not layer.training and not torch.is_grad_enabled() and fp8.served is not None:
        return served_in_graph(x, *fp8.served, bias, fp8.casts, *buffers)
    return linear_in_graph(x, weight, bias, casts, scales_of_block(weight), *buffers)


def _is_mixed(x: Any, weight: Tensor) -> bool:
    """Return whether ``F.linear`` refuses these dtypes; x may be a tracer's proxy."""
    if not isinstance(x, Tensor) or x.dtype == weight.dtype:
        return False
    return autocast_dtype(x.device.type) is None


class Float8Linear(Float8Layer, nn.Linear):
    """An ``nn.Linear`` with its GEMMs in FP8: ``y = x w^T + b``, ``dx = g w``, ``dw = g^T x``.

    `torch_fp8.convert_to_float8` makes one by swapping the class of an existing module in place.

    Shapes: input (..., K), weight (N, K), bias (N,), output (..., N); see `Float8Layer`.
    """

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_scaling()


def is_paused(layer: nn.Module) -> bool:
    """Return whether a layer is paused."""
    return isinstance(layer, Float8Layer) and layer.fp8.paused
