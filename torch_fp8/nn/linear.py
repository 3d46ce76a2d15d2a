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
from torch.distributed.tensor import DTensor

from torch_fp8.autograd import current_pass
from torch_fp8.autograd.current_pass import is_transformed
from torch_fp8.config import FP8Config
from torch_fp8.nn.delayed_scaling import (
    BUFFERS,
    pushed_history,
    restore_scales,
    scales_of,
    scaling_buffers,
)
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.nn.layer_fp8 import LayerFP8, check
from torch_fp8.nn.linear_function import linear, linear_in_graph, served_in_graph
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.lazy_quantized import plain as plain_activation
from torch_fp8.tensor.quantizer import autocast_dtype

_NOT_PLAIN = (DTensor, QuantizableTensor)
"""Tensors of which a graph of torch.compile has to know more than of others."""


class Float8Layer(FrozenStorage):
    """The part of a linear layer that runs its fprop, dgrad and wgrad GEMMs in FP8.

    It stands in front of a class that has ``weight`` and ``bias`` (see `Float8Linear`).

    Shapes: input (..., K), weight (N, K), output (..., N); any K, N and number of tokens, zero
    included. The output has autocast's dtype where autocast is on, else the input's.

    Raises:
        TypeError: an input that is not float32, bfloat16 or float16.
    """

    in_features: int
    out_features: int
    fp8: LayerFP8
    fp8_adds_bias: bool = True
    """False where a parallel style adds it, after its group has summed the output."""
    fp8_transposed: bool = False
    """Whether the weight is stored as (K, N)."""
    _fp8_class: type[LayerFP8] = LayerFP8

    @property
    def fp8_weights(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    @property
    def runs_fp8(self) -> bool:
        fp8 = self.fp8
        if current_pass.requested or torch.compiler.is_exporting() or fp8.paused:
            return False
        return self.training or fp8.config.eval_fp8

    def forward(self, input: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if not self.runs_fp8 or (not compiling and is_transformed()):
            return self._in_high_precision(plain_activation(input))
        if input.is_nested:
            return self._of_jagged(input)
        if compiling:
            return _in_graph(self, input)
        if not torch.is_grad_enabled():
            output = self.fp8.repeated(self, input)
            if output is not None:
                return output
        operands = self.fp8.operands(self, input)
        return operands.output(linear(*operands[:4], self.fp8.options(self, operands)))

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            f"torch.jit.script cannot compile {self.fp8.name or 'a layer'}, which runs in FP8. "
            "Make it a stock layer again, or script a copy of the model: "
            "torch.jit.script(stock), after stock = copy.deepcopy(model); torch_fp8.revert(stock)"
        )

    def _of_jagged(self, input: Tensor) -> Tensor:
        """Run on the tokens of all sequences, (sum of lengths, K), of a jagged nested tensor."""
        if input.layout != torch.jagged or input.ndim != 3 or isinstance(input.shape[1], int):
            return self._in_high_precision(input)
        output = self.forward(input.values())
        return torch.nested.nested_tensor_from_jagged(output, input.offsets(), input.lengths())

    def _in_high_precision(self, x: Tensor) -> Tensor:
        """What `forward` does where it does not run in FP8, with a weight of any dtype."""
        if not torch.compiler.is_compiling():
            self.fp8.called = True
        if self.fp8.frozen is not None or _is_mixed(x, self.weight):
            return self.dequantized_forward(x)
        output: Tensor = super().forward(x)
        return output

    # ---- conversion, and what a layer remembers --------------------------------------------------

    def configure(self, name: str, config: FP8Config, recipe: Recipe, emulate: bool) -> None:
        """Run `recipe` from now on, with what it remembers empty.

        Args:
            name: qualified, for errors.
            config, recipe: what was asked for, and what that is here.
            emulate: run its GEMMs through the reference path.
        """
        frozen = self.drop_fp8()
        transposed = type(self).fp8_transposed
        self.fp8 = self._fp8_class(name, config, recipe, emulate, transposed, frozen)
        if self.fp8.scaling is not None:
            self.fp8.scaling.start(self)

    def run_recipe(self, recipe: Recipe, emulate: bool) -> None:
        self.configure(self.fp8.name, self.fp8.config, recipe, emulate)

    def drop_fp8(self) -> Any:
        """Remove what `configure` made; return the state of a frozen weight, if there is one."""
        fp8: LayerFP8 | None = self.__dict__.pop("fp8", None)
        if fp8 is None:
            return None
        if fp8.scaling is not None:
            fp8.scaling.stop(self)
        return fp8.frozen

    def restart(self) -> None:
        """Begin anew, with what the layer remembers empty."""
        self.run_recipe(self.fp8.recipe, self.fp8.emulate)

    def reset_scaling(self) -> None:
        """Empty the histories of delayed scaling."""
        if self.fp8.scaling is not None:
            self.fp8.scaling.reset(self)

    @property
    def scaling_state(self) -> tuple[Tensor, Tensor]:
        """Delayed scaling's amaxes (3, H), the newest first; scales of input and weight (2,).

        What was recorded since the last step of an optimizer is among the amaxes.
        """
        history = pushed_history(self)
        return history, scales_of(self, history[None])[0, :2]

    def load_scaling_state(self, history: Tensor, last_scale: Tensor) -> None:
        """Go on from what `scaling_state` was; the history suggests the scales."""
        self.reset_scaling()
        scaling_buffers(self)[0].copy_(history)
        if history.any():
            assert self.fp8.scaling is not None
            self.fp8.scaling.ready = True
            restore_scales([self])

    # ---- what torch asks of a module -------------------------------------------------------------

    def train(self, mode: bool = True) -> "Float8Layer":
        if mode:
            self.fp8.payloads.forget_evaluation()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.fp8.release()  # of another device or dtype soon
        before = {n: b for n in BUFFERS if (b := self._buffers.get(n)) is not None}
        super()._apply(fn, recurse)
        if self.fp8.scaling is not None:
            self.fp8.scaling.after_move(self, before)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        scaling = self.fp8.scaling
        if scaling is None or self.weight.is_meta:
            return
        if any(buffer.is_meta for buffer in scaling_buffers(self)):
            scaling.start(self)  # the weight was assigned, which left these behind

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.fp8.scaling is not None:
            self.fp8.scaling.track(self)

    def extra_repr(self) -> str:
        frozen = "" if self.frozen_weight is None else ", frozen"
        return f"{super().extra_repr()}, fp8={self.fp8.recipe}{frozen}"


def _in_graph(layer: Float8Layer, x: Tensor) -> Tensor:
    """Return what `Float8Layer.forward` does in a graph of torch.compile.

    It is a function because a graph guards on each method that it calls.
    """
    fp8, weight, ready = layer.fp8, layer.weight, False
    buffers: tuple[Any, ...] = ()
    if isinstance(x, _NOT_PLAIN) or isinstance(weight, _NOT_PLAIN):
        operands = fp8.operands(layer, x)
        if fp8.scaling is not None:
            buffers = scaling_buffers(layer)[1:]
        shape = operands.shape
        # torch 2.13 loses views in the backward of a function with sharded tensors: none go in.
        rows = operands.input.reshape(-1, shape[-1])  # (M, K)
        tensors = rows, operands.weight, operands.bias, rows.shape
        y = linear(*tensors, fp8.new_options(layer, operands), *buffers)
        return operands.output(y.reshape(*shape[:-1], y.shape[-1]))
    check(fp8, x.shape, x.dtype, weight)
    bias = layer.bias if layer.fp8_adds_bias else None
    if fp8.scaling is not None:
        own, ready = layer._buffers, fp8.scaling.ready
        buffers = own["fp8_scales"], own["fp8_amaxes"], own["fp8_grad_amax"]
    if not layer.training and not torch.is_grad_enabled() and fp8.served is not None:
        served: Tensor = served_in_graph(x, *fp8.served, bias, (fp8.casts, ready), *buffers)
        return served
    casts = fp8.casts, ready, layer.training
    output: Tensor = linear_in_graph(x, weight, bias, casts, *buffers)
    return output


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
