"""`LayerFP8`: what a converted linear layer has beside its weight and bias, as its attribute `fp8`.

The layer is the user's module. Its configuration and recipe, its quantizers, what is kept of its
weight and what delayed scaling remembers lie here; `torch_fp8.revert` deletes the attribute.
Methods take the layer as an argument where they need its tensors or its mode.

**The repeated forward.** A token of generation is little work for the device, and what Python takes
to find out how a layer multiplies is most of its time. Where the weight is kept in FP8
(`torch_fp8.tensor.payload_cache`), all of that was decided in an earlier forward; `repeated` casts
the input and multiplies.

Legend: M tokens, K in, N out.
"""

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.function import as_text, reshaped
from torch_fp8.config import FP8Config
from torch_fp8.nn.delayed_scaling import LayerScaling
from torch_fp8.nn.dtensor_layout import Parts, local_operands
from torch_fp8.nn.frozen_storage import FrozenState
from torch_fp8.nn.linear_function import LinearOptions
from torch_fp8.ops.registry import is_watched
from torch_fp8.ops.scaled_mm import cast, lay_out, multiply_laid_out
from torch_fp8.quantization.recipe import CastSpec, Recipe
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor
from torch_fp8.tensor.payload_cache import PayloadCache
from torch_fp8.tensor.quantizer import (
    ChannelMaxima,
    Quantizer,
    Quantizers,
    WeightQuantizer,
    autocast_dtype,
)
from torch_fp8.tensor.scale_source import OF_TENSOR

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Operands(NamedTuple):
    """A layer's tensors on this rank.

    Attributes:
        input, weight, bias: (..., K), (N, K) and (N,), or this rank's parts of them.
        shape, dtype: those of the input, asked once: a produced activation answers in Python.
        parts: how they lie on the ranks of tensor parallelism; None: they are whole.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    parts: Parts | None

    def output(self, output: Tensor) -> Tensor:
        """Return the output (..., N) as the layer returns it."""
        return output if self.parts is None else self.parts.whole(output)


class LayerFP8:
    """How one linear layer runs in FP8, and what it keeps for that.

    Args:
        name: qualified name of the layer, for errors.
        config, recipe: what was asked for, and what that is on this device.
        emulate: whether its GEMMs run through the reference path.
        transposed: whether the weight is stored as (K, N).
        frozen: state of a weight that is stored as FP8 alone; None: it is not.

    Attributes:
        casts: recipe, `transposed` and `emulate` as a constant of a graph of torch.compile.
        scaling: delayed scaling's memory; None: scales come from the tensors at hand, or
            Transformer Engine has them.
        payloads: cache of the weight as it was cast.
        channels: what Smooth-SwiGLU found in the last forward, where the recipe is smooth.
        observer: monitor that sees the operands of the GEMMs; see `observe`.
        served: codes, scales and granularity of the weight, for graphs of torch.compile in a
            rollout.
        called: whether it has run, in eager code; see `torch_fp8.nn.bypassed_layers`.
        paused: whether the layer runs in high precision for a while; see `torch_fp8.nn.paused`.
    """

    def __init__(
        self,
        name: str,
        config: FP8Config,
        recipe: Recipe,
        emulate: bool,
        transposed: bool = False,
        frozen: FrozenState | None = None,
    ) -> None:
        self.name, self.config, self.recipe = name, config, recipe
        self.transposed, self.frozen = transposed, frozen
        own = config.backend == "torch"
        self.scaling = LayerScaling() if own and recipe.delayed else None
        self.payloads = PayloadCache(transposed, own and config.keep_eval_weights)
        self.channels = ChannelMaxima() if recipe.smooth else None
        self.observer: Any = None
        self.served: tuple[Tensor, Tensor, str] | None = None
        self.called = self.paused = False
        self._quantizers: dict[bool, Quantizers] = {}
        self._options: dict[Any, LinearOptions] = {}
        self.run_emulated(emulate)

    def run_emulated(self, emulate: bool) -> None:
        """Run the GEMMs through the reference path from now on, or by torch's operator."""
        self.emulate = emulate
        self.casts = as_text((self.recipe, self.transposed, emulate))
        self.forget_quantizers()

    @property
    def scales_known(self) -> bool:
        """Whether delayed scaling has scales for the next casts."""
        return self.scaling is not None and self.scaling.ready

    # ---- how operands are cast -------------------------------------------------------------------

    def quantizers(self, layer: Any, group: Any = None) -> Quantizers:
        """Return how the operands are cast now; in eager code with delayed scales.

        Args:
            layer: the layer.
            group: ranks that have other parts of the operands; None: there are none.
        """
        compiling = torch.compiler.is_compiling()
        steady = group is None and not compiling
        records = self.scaling is not None and layer.training
        if steady:  # many objects, which change with this and the scales alone
            known = self._quantizers.get(records)
            if known is not None:
                return known
        if not compiling:
            self.called = True
        recipe = self.recipe
        sources: tuple[Any, ...] = (OF_TENSOR,) * 3
        if self.scaling is not None and not compiling:
            sources = self.scaling.sources(layer)
        of_input, of_weight, of_gradient = sources
        quantizers = Quantizers(
            Quantizer(recipe.input, of_input, group),
            WeightQuantizer(
                Quantizer(recipe.weight, of_weight, group), self.payloads, self.transposed
            ),
            Quantizer(recipe.grad_output, of_gradient, group),
            self.channels,
            None if compiling else self.observer,
        )
        if steady:
            self._quantizers[records] = quantizers
        return quantizers

    def quantizer(self, layer: Any, operand: int, group: Any = None) -> Quantizer:
        """Return that of INPUT, WEIGHT or GRAD_OUTPUT; see `quantizers`."""
        every = self.quantizers(layer, group)
        return (every.input, every.weight.quantizer, every.grad_output)[operand]

    def producer_quantizer(self, layer: Any, operand: int) -> Quantizer | None:
        """Return that of INPUT or GRAD_OUTPUT, if its scale is known before the cast."""
        if self.scaling is None or isinstance(layer.weight, DTensor):
            return None
        quantizer = self.quantizer(layer, operand)
        return None if quantizer.source.scale is None else quantizer

    def spec(self, operand: int) -> CastSpec:
        """Return how the recipe casts INPUT, WEIGHT or GRAD_OUTPUT."""
        return (self.recipe.input, self.recipe.weight, self.recipe.grad_output)[operand]

    def observe(self, observer: Any) -> None:
        """Show each operand of a GEMM to a monitor from now on.

        Args:
            observer: see `torch_fp8.tensor.quantizer.Quantizers`; None: nobody.
        """
        self.observer = observer
        self.forget_quantizers()
        self.payloads.quantizer = None  # so that `repeated` asks again

    def forget_quantizers(self) -> None:
        """Make the quantizers anew in the next forward."""
        self._quantizers.clear()
        self._options.clear()

    # ---- a forward -------------------------------------------------------------------------------

    def operands(self, layer: Any, input: Tensor) -> Operands:
        """Return the tensors that this rank multiplies; here alone are DTensors unwrapped.

        Raises:
            TypeError, ValueError: see `check` and `torch_fp8.nn.dtensor_layout.local_operands`.
        """
        weight, parts = layer.weight, None
        bias = layer.bias if layer.fp8_adds_bias else None
        if isinstance(weight, DTensor) or isinstance(input, DTensor):
            input, weight, bias, parts = local_operands(self, input, weight, bias)
        shape, dtype = input.shape, input.dtype
        check(self, shape, dtype, weight)
        return Operands(input, weight, bias, shape, dtype, parts)

    def options(self, layer: Any, operands: Operands) -> LinearOptions:
        """Return `new_options` in eager code, from an earlier forward where there was one.

        Delayed scaling has recorded amaxes then, and what the cache keeps of the weight for
        evaluation goes with the first forward that takes gradients.
        """
        if self.payloads.payload is not None and torch.is_grad_enabled():
            self.payloads.forget_evaluation()
        if self.scaling is not None and layer.training:
            self.scaling.recorded = True
        if operands.parts is not None:
            return self.new_options(layer, operands)
        key = operands.dtype, autocast_dtype(operands.weight.device.type), layer.training
        options = self._options.get(key)
        if options is None:
            options = self._options[key] = self.new_options(layer, operands)
        return options

    def new_options(self, layer: Any, operands: Operands) -> LinearOptions:
        """Return what `torch_fp8.nn.linear_function.linear` needs beside tensors."""
        compiling = torch.compiler.is_compiling()
        group = None if operands.parts is None else operands.parts.mesh.get_group()
        return LinearOptions(
            "" if compiling else self.name,  # see `torch_fp8.autograd.function.name_of`
            operands.dtype,
            autocast_dtype(operands.weight.device.type) or operands.dtype,
            self.recipe,
            self.quantizers(layer, group),
            self.emulate,
            layer.training,
            compiling and self.scales_known,
        )

    def repeated(self, layer: Any, input: Tensor) -> Tensor | None:
        """Return the output of a forward without gradients that an earlier one has prepared.

        Returns:
            The output (..., N); None: the layer has to look at everything anew.
        """
        cache, weight = self.payloads, layer._parameters.get("weight")
        if weight is None or cache.payload is None or self.emulate:
            return None
        if layer.training or not cache.is_current(weight):
            return None
        if type(input) is LazyQuantizedTensor:
            shape, dtype = input.outer_shape, input.outer_dtype
        elif type(input) is Tensor and not is_watched(input):
            shape, dtype = input.shape, input.dtype
        else:
            return None
        if not shape or shape[-1] != cache.columns or dtype not in FLOATS:
            return None
        if cache.quantizer is None:
            if self.observer is not None:
                return None
            with torch.inference_mode(False), torch.no_grad():
                cache.quantizer = self.quantizers(layer).input
        if type(input) is LazyQuantizedTensor:
            a = input.production.rowwise(cache.quantizer)
        else:
            a, _, _ = cache.quantizer(input, rowwise=True, columnwise=False)
        if is_watched(a.qdata) or not a.qdata.numel():
            return None
        if cache.operand is None:
            cache.operand = lay_out(cache.payload, cache.columns)
        out_dtype = autocast_dtype(cache.device_type) or dtype
        bias = layer._parameters["bias"] if layer.fp8_adds_bias else None
        bias = bias if bias is None else cast(bias, out_dtype)
        y = multiply_laid_out(a, cache.operand, out_dtype, self.recipe.fprop.fast_accum, bias)
        whole = (*shape[:-1], y.shape[1])  # y (M, N)
        # As `reshaped` does, in less time: the result is no view.
        return y.resize_(whole) if y.is_contiguous() else reshaped(y, whole)

    # ---- a scope in which nobody writes to the weight --------------------------------------------

    def begin_scope(self, layer: Any, compiled: bool) -> None:
        """Begin a scope in which nobody writes to the weight.

        Args:
            layer: the layer.
            compiled: whether to cast the weight now, for graphs of torch.compile, which cannot keep
                it by themselves.
        """
        cache, weight = self.payloads, layer._parameters.get("weight")
        if not cache.keeps_evaluation or self.recipe.smooth:
            return
        if weight is None or isinstance(weight, DTensor) or not weight.numel():  # gathered later
            return
        cache.begin_scope(weight)
        if not (compiled or cache.captured is not None):
            return
        with torch.no_grad(), torch.inference_mode(False):
            self.quantizers(layer).weight.without_gradients(weight, layer.training)
        if compiled and cache.payload is not None:
            cache.captured = cache.payload
            for part in cache.payload[:2]:  # CUDA graphs of a compiler read them where they are
                torch._dynamo.mark_static_address(part, guard=False)
            self.served = tuple(cache.payload)

    def end_scope(self, keep_graphs: bool) -> None:
        """End it.

        Args:
            keep_graphs: whether CUDA graphs that were captured within will be replayed.
        """
        self.served = None
        self.payloads.end_scope(keep_graphs)

    def release(self) -> None:
        """Free what is kept of the weight and of scales, which will lie elsewhere soon."""
        self.served = None
        self.forget_quantizers()
        self.payloads.release()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "scaling": copy(self.scaling), "_quantizers": {}, "_options": {}}


def check(fp8: LayerFP8, shape: torch.Size, dtype: torch.dtype, weight: Tensor) -> None:
    """Refuse what the layer cannot multiply.

    Args:
        fp8: the layer's.
        shape, dtype: those of the input.
        weight: (N, K), or (K, N) where it is stored so.
    Raises:
        TypeError: an input or a weight that is not float32, bfloat16 or float16.
        ValueError: an input of another width.
    """
    if dtype not in FLOATS:
        raise TypeError(
            f"FP8 linear '{fp8.name}' takes float32, bfloat16 or float16 input, got {dtype}; "
            f"cast it, or keep the module in high precision with FP8Config(skip=('{fp8.name}',"
            "))"
        )
    if weight.dtype not in FLOATS:
        raise TypeError(
            f"the weight of FP8 linear '{fp8.name}' is {weight.dtype}, as model.double() "
            "makes it; FP8 GEMMs take float32, bfloat16 or float16: call model.float(), or "
            "torch_fp8.revert(model) first"
        )
    features = weight.shape[0 if fp8.transposed else 1]
    if not shape or shape[-1] != features:
        raise ValueError(
            f"FP8 linear '{fp8.name}' takes inputs (..., {features}), got {tuple(shape)}"
        )
