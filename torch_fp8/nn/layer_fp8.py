"""`LayerFP8`: the state that conversion adds to a linear layer, as its attribute `fp8`.

It holds the layer's configuration, recipe, quantizers, cached payload and delayed scaling, and
`torch_fp8.revert` deletes it. Methods take the layer if they need its tensors or its mode.

Legend: M tokens, K in, N out.
"""

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fp8.autograd.current_pass import autocast_dtype, warn_of_disabled_autocast
from torch_fp8.autograd.function import as_text
from torch_fp8.config import FP8Config
from torch_fp8.nn.delayed_scaling import INPUT, LayerScaling
from torch_fp8.nn.dtensor_layout import Parts, local_operands
from torch_fp8.nn.frozen_storage import FrozenState
from torch_fp8.nn.linear_function import LinearOptions, PlainOperands
from torch_fp8.nn.scaling_rule import ScalingRule
from torch_fp8.nn.smooth_operands import SmoothOperands
from torch_fp8.quantization.formats import CAST_DTYPES
from torch_fp8.quantization.recipe import Recipe
from torch_fp8.quantization.scaling import OF_TENSOR
from torch_fp8.tensor.lazy_quantized import LazyQuantizedTensor
from torch_fp8.tensor.payload_cache import PayloadCache
from torch_fp8.tensor.quantizer import ChannelMaxima, Quantizer, Quantizers, WeightQuantizer


class Operands(NamedTuple):
    """The tensors of a layer on this rank.

    Attributes:
        input, weight, bias: (..., K), (N, K) and (N,), or this rank's parts of them.
        shape, dtype: shape and dtype of the input, read once: tensor subclasses answer slowly.
        parts: distribution of the output over tensor-parallel ranks, or None if not sharded.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    parts: Parts | None

    def output(self, output: Tensor) -> Tensor:
        """Return the layer's output (..., N): the tensor itself, or a DTensor with it as a part."""
        return output if self.parts is None else self.parts.whole(output)


class LayerFP8:
    """The FP8 state of one linear layer.

    Args:
        name: qualified name of the layer, for errors.
        config: configuration of the layer.
        recipe: recipe that `config` resolves to on this device.
        emulate: whether GEMMs run through the reference path.
        transposed: whether the weight is stored as (K, N).
        frozen: state of a weight that is stored as FP8 only, or None if it is not.

    Attributes:
        casts: recipe, `transposed`, `emulate` and `operand_class` as a string, a constant for
            graphs of torch.compile.
        scaling: state of delayed scaling, or None if each cast computes its scale.
        payloads: cache of the weight's payload.
        channels: channel maxima of the last forward, if the recipe is smooth; else None.
        observer: monitor that sees the operands of the GEMMs; see `observe`.
        served: codes, scales and granularity of the weight, for graphs in a rollout.
        called: whether the layer has run in eager code; see `torch_fp8.nn.optimizer_checks`.
        group: weak reference to the `torch_fp8.nn.input_group.InputGroup` of the layer, or None.
        paused: whether the layer temporarily runs in high precision; see `nn.linear.pause`.
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
        rule = ScalingRule.of(config, recipe)
        self.scaling = LayerScaling(rule) if rule else None
        self.payloads = PayloadCache(config.backend == "torch" and config.keep_eval_weights)
        self.channels = ChannelMaxima() if recipe.smooth else None
        self.observer: Any = None
        self.group: Any = None
        self.served: tuple[Tensor, Tensor, str] | None = None
        self.called = self.paused = False
        self._quantizers: dict[bool, Quantizers] = {}
        self._options: dict[Any, LinearOptions] = {}
        self.run_emulated(emulate)

    def run_emulated(self, emulate: bool) -> None:
        """Set whether GEMMs run through the reference path, instead of torch's operator."""
        self.emulate = emulate
        self.casts = as_text((self.recipe, self.transposed, emulate, self.operand_class))
        self.forget_quantizers()

    @property
    def operand_class(self) -> type[PlainOperands]:
        """Class that casts the operands of fprop."""
        return SmoothOperands if self.recipe.smooth else PlainOperands

    @property
    def delayed(self) -> LayerScaling | None:
        """The state of delayed scaling if eager code uses it, too."""
        return self.scaling if self.scaling is not None and self.scaling.rule.eager else None

    @property
    def scales_known(self) -> bool:
        """Whether delayed scaling has scales for the next casts."""
        return self.scaling is not None and self.scaling.ready

    # ---- how operands are cast -------------------------------------------------------------------

    def quantizers(self, layer: Any, group: Any = None) -> Quantizers:
        """Return the quantizers of the operands; in eager code with the scales of delayed scaling.

        Args:
            layer: layer to which this state belongs.
            group: process group of ranks with other parts of the operands, or None if not sharded.
        """
        compiling = torch.compiler.is_compiling()
        steady = group is None and not compiling
        records = self._records(layer)
        if steady:  # cached: they are many objects, and depend on `records` and the scales only
            known = self._quantizers.get(records)
            if known is not None:
                return known
        if not compiling:
            self.called = True
        specs = self.recipe.input, self.recipe.weight, self.recipe.grad_output
        sources: tuple[Any, ...] = (OF_TENSOR,) * 3
        if self.delayed is not None and not compiling:
            sources = self.delayed.sources(layer)
        x, w, g = [Quantizer(spec, s, group) for spec, s in zip(specs, sources, strict=True)]
        weight = WeightQuantizer(w, self.payloads, self.transposed)
        quantizers = Quantizers(x, weight, g, self.channels, None if compiling else self.observer)
        if steady:
            self._quantizers[records] = quantizers
        return quantizers

    def _records(self, layer: Any) -> bool:
        """Return whether casts record amaxes; first take over scales that are in shared memory."""
        if self.delayed is None:
            return False
        scales, training = layer.fp8_scales, layer.training
        if scales.device.type == "cpu" and not torch.compiler.is_compiling() and scales.is_shared():
            self.delayed.follow(layer)
        return training

    def quantizer(self, layer: Any, operand: int, group: Any = None) -> Quantizer:
        """Return the quantizer of one operand: INPUT, WEIGHT or GRAD_OUTPUT; see `quantizers`."""
        every = self.quantizers(layer, group)
        return (every.input, every.weight.quantizer, every.grad_output)[operand]

    def producer_quantizer(self, layer: Any, operand: int) -> Quantizer | None:
        """Return the quantizer of INPUT or GRAD_OUTPUT if its scale is already known, or None.

        An input with block scales needs no other scale.
        """
        if operand == INPUT and not self.operand_class.independent:
            return None
        is_block = operand == INPUT and self.recipe.input.granularity.startswith("block")
        is_known = self.scaling is not None and not isinstance(layer.weight, DTensor)
        if not (is_block or is_known):
            return None
        quantizer = self.quantizer(layer, operand)
        return quantizer if is_block or quantizer.source.scale is not None else None

    def observe(self, observer: Any) -> None:
        """Show each operand of a GEMM to a monitor (see `Quantizers`), or to none if it is None."""
        self.observer = observer
        self.forget_quantizers()
        self.payloads.quantizer = None  # so that `repeated` asks again

    def forget_quantizers(self) -> None:
        """Drop cached quantizers, so that the next forward makes new ones."""
        self._quantizers.clear()
        self._options.clear()

    # ---- a forward -------------------------------------------------------------------------------

    def operands(self, layer: Any, input: Tensor) -> Operands:
        """Return the tensors that this rank multiplies. Only this method unwraps DTensors.

        Raises:
            TypeError, ValueError: see `check_input`, `torch_fp8.nn.dtensor_layout`.
        """
        weight, parts = layer.weight, None
        bias = layer.bias if layer.fp8_adds_bias else None
        if isinstance(weight, DTensor) or isinstance(input, DTensor):
            input, weight, bias, parts = local_operands(self, input, weight, bias)
        return Operands(input, weight, bias, *check_input(self, input, weight), parts)

    def options(self, layer: Any, operands: Operands) -> LinearOptions:
        """Return `new_options` in eager code, cached from an earlier forward if possible.

        It also notes that amaxes are recorded, and drops the payload of evaluation before training.
        """
        if self.payloads.payload is not None and torch.is_grad_enabled():
            self.payloads.forget()
        if self.scaling is not None and self._records(layer):
            self.scaling.recorded = True
        if operands.parts is not None:
            return self.new_options(layer, operands)
        key = operands.dtype, autocast_dtype(operands.weight.device.type), layer.training
        options = self._options.get(key)
        if options is None:
            if key[:2] == (torch.float32, None) and operands.weight.dtype == torch.float32:
                warn_of_disabled_autocast(self.name)
            options = self._options[key] = self.new_options(layer, operands)
        return options

    def new_options(self, layer: Any, operands: Operands) -> LinearOptions:
        """Return the arguments of `torch_fp8.nn.linear_function.linear` that are not tensors."""
        compiling = torch.compiler.is_compiling()
        group = None if operands.parts is None else operands.parts.mesh.get_group()
        name = "" if compiling else self.name  # see `torch_fp8.autograd.function.name_of`
        out_dtype = autocast_dtype(operands.weight.device.type) or operands.dtype
        products = self.recipe, self.quantizers(layer, group), self.emulate, layer.training
        return LinearOptions(name, operands.dtype, out_dtype, *products, self.operand_class)

    def release(self) -> None:
        """Free cached payloads and quantizers, before weight and scales move."""
        self.served = None
        self.forget_quantizers()
        self.payloads.release()

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "group": None}  # the copy of the norm sets its group
        return {**state, "scaling": copy(self.scaling), "_quantizers": {}, "_options": {}}


def check_input(fp8: LayerFP8, input: Tensor, weight: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Check that a layer can multiply an input; return its shape and dtype, each read once.

    Args:
        fp8: state of the layer.
        input: input of the layer.
        weight: (N, K), or (K, N) if `fp8.transposed`.
    Raises:
        TypeError: input or weight has another dtype, or torchao has quantized the weight.
        ValueError: the last dimension of the input is not K, or it is on another device.
    """
    name, x = fp8.name, input
    is_lazy = type(x) is LazyQuantizedTensor
    shape, dtype = (x.outer_shape, x.outer_dtype) if is_lazy else (x.shape, x.dtype)
    if dtype not in CAST_DTYPES:
        raise TypeError(
            f"FP8 linear '{name}' takes float32, bfloat16 or float16 input, got {dtype}; "
            f"cast it, or keep the module in high precision with FP8Config(skip=('{name}',))"
        )
    if weight.dtype not in CAST_DTYPES:
        raise TypeError(
            f"the weight of FP8 linear '{name}' is {weight.dtype}, as model.double() makes it; FP8 "
            "GEMMs take float32, bfloat16 or float16: call model.float(), or "
            "torch_fp8.revert(model) first"
        )
    is_own = type(weight) is nn.Parameter or torch.compiler.is_compiling()
    if not is_own and type(weight).__module__.startswith("torchao."):
        raise TypeError(
            f"the weight of FP8 linear '{name}' is torchao's {type(weight).__name__}: call "
            "torch_fp8.revert(model) before torchao's quantize_(model)"
        )
    features = weight.shape[0 if fp8.transposed else 1]
    if not shape or shape[-1] != features:
        raise ValueError(f"FP8 linear '{name}' takes inputs (..., {features}), got {tuple(shape)}")
    if input.device != weight.device:
        devices = f"is on {weight.device}, but its input is on {input.device}"
        raise ValueError(f"FP8 linear '{name}' {devices}; move one of them")
    return shape, dtype
