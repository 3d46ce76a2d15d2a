"""`LayerQuantizers`: the quantizers of a linear layer, and what they remember between steps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torch_fp8.nn.dtensor_layout import LocalOperands, local_operands
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.payload_cache import PayloadCache
from torch_fp8.tensor.quantizer import ChannelMaxima, Quantizer, Quantizers, WeightQuantizer
from torch_fp8.tensor.scale_source import OF_TENSOR

NOT_PLAIN = (DTensor, QuantizableTensor)
"""Tensors of which a graph of torch.compile has to know more than of others."""


class Operands(NamedTuple):
    """A layer's tensors: input (..., K) and weight (N, K)."""

    input: Tensor
    weight: Tensor

    @property
    def group(self) -> Any:
        """The ranks that have parts of the weight; None: there are no others."""
        return None

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """What is added to the output here."""
        return bias

    def whole(self, output: Tensor) -> Tensor:
        """The output as the layer returns it."""
        return output


class LayerQuantizers(FrozenStorage):
    """The part of a layer that knows how its operands are cast."""

    fp8_payloads: PayloadCache | None = None
    fp8_channels: ChannelMaxima | None = None
    """What Smooth-SwiGLU found in the last forward, where the recipe is smooth."""
    fp8_observer: Any = None
    """Whom the layer shows the operands of its GEMMs; see `observe`."""
    fp8_served: tuple[Tensor, Tensor, str] | None = None
    """Codes, scales and granularity of the weight, for graphs of torch.compile in a rollout."""
    fp8_delayed: bool = False
    """Whether the recipe scales by histories: `Recipe.delayed`, asked once."""

    def quantizers(self, group: Any = None) -> Quantizers:
        """How the operands are cast now; in eager code with their scales, if these are delayed.

        Args:
            group: ranks that have other parts of them; or None.
        """
        compiling = torch.compiler.is_compiling()
        steady = group is None and not compiling
        training = self.fp8_delayed and self.training
        if training and not compiling:
            self.fp8_recorded = True
        if steady:  # many objects, which change with this and the scales alone
            memo = self.__dict__.setdefault("_fp8_quantizers", {})
            of_before: Quantizers | None = memo.get(training)
            if of_before is not None:
                return of_before
        recipe = self.fp8_recipe
        delayed = self.fp8_delayed and not compiling
        of_input, of_weight, of_gradient = self.scale_sources() if delayed else (OF_TENSOR,) * 3
        quantizers = Quantizers(
            Quantizer(recipe.input, of_input, group),
            WeightQuantizer(
                Quantizer(recipe.weight, of_weight, group), self.fp8_payloads, self.fp8_transposed
            ),
            Quantizer(recipe.grad_output, of_gradient, group),
            self.fp8_channels,
            None if compiling else self.fp8_observer,
        )
        if steady:
            memo[training] = quantizers
        return quantizers

    def observe(self, observer: Any) -> None:
        """Show each operand of a GEMM to a monitor from now on.

        Args:
            observer: see `torch_fp8.tensor.quantizer.Quantizers`; None: nobody.
        """
        self.__dict__.pop("_fp8_quantizers", None)
        self.__dict__.pop("fp8_observer", None)
        if observer is not None:
            self.fp8_observer = observer
        if self.fp8_payloads is not None:
            self.fp8_payloads.quantizer = None  # so that `RepeatedForward` asks again

    def operands(self, input: Tensor) -> Operands | LocalOperands:
        """The tensors that are multiplied here; what is kept of the weight goes with gradients."""
        weight: Tensor = self.weight
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            cache = self.fp8_payloads
            if cache is not None and cache.payload is not None:
                cache.forget_evaluation()
        if isinstance(weight, DTensor) or isinstance(input, DTensor):
            return local_operands(self, input)
        return Operands(input, weight)

    def graph_buffers(self) -> tuple[Any, ...]:
        """The scales and slots that a graph of torch.compile takes, if they are delayed."""
        return self.scaling_buffers()[1:] if self.fp8_delayed else ()

    def quantizer(self, operand: int, group: Any = None) -> Quantizer:
        """That of INPUT, WEIGHT or GRAD_OUTPUT."""
        every = self.quantizers(group)
        return (every.input, every.weight.quantizer, every.grad_output)[operand]

    def producer_quantizer(self, operand: int) -> Quantizer | None:
        """Return that of INPUT or GRAD_OUTPUT, if its scale is known before the cast."""
        if not self.fp8_delayed or isinstance(self.weight, DTensor):
            return None
        quantizer = self.quantizer(operand)
        return None if quantizer.source.scale is None else quantizer

    def operand_spec(self, operand: int) -> CastSpec:
        """How the recipe casts INPUT, WEIGHT or GRAD_OUTPUT."""
        recipe = self.fp8_recipe
        return (recipe.input, recipe.weight, recipe.grad_output)[operand]

    def init_scaling(self) -> None:
        """Begin anew, with empty histories and quantizers of the recipe."""
        self.__dict__.pop("_fp8_quantizers", None)
        self.__dict__.pop("fp8_channels", None)
        if self.fp8_recipe.smooth:
            self.fp8_channels = ChannelMaxima()
        self.__dict__.pop("fp8_payloads", None)
        if self.fp8_config.backend == "torch":
            self.fp8_payloads = PayloadCache(self.fp8_transposed, self.fp8_config.keep_eval_weights)
        super().init_scaling()

    def begin_scope(self, compiled: bool) -> None:
        """Begin a scope in which nobody writes to the weight.

        Args:
            compiled: cast it now, for graphs of torch.compile, which cannot keep it by themselves.
        """
        cache, weight = self.fp8_payloads, self._parameters.get("weight")
        if cache is None or not cache.keeps_evaluation or self.fp8_recipe.smooth:
            return
        if weight is None or isinstance(weight, DTensor) or not weight.numel():  # gathered later
            return
        cache.begin_scope(weight)
        if not (compiled or cache.captured is not None):
            return
        with torch.no_grad(), torch.inference_mode(False):
            self.quantizers().weight.without_gradients(weight, self.training)
        if compiled and cache.payload is not None:
            cache.captured = cache.payload
            for part in cache.payload[:2]:  # CUDA graphs of a compiler read them where they are
                torch._dynamo.mark_static_address(part, guard=False)
            self.fp8_served = tuple(cache.payload)

    def end_scope(self, keep_graphs: bool) -> None:
        """End it.

        Args:
            keep_graphs: whether CUDA graphs that were captured within will be replayed.
        """
        self.__dict__.pop("fp8_served", None)
        if self.fp8_payloads is not None:
            self.fp8_payloads.end_scope(keep_graphs)

    def train(self, mode: bool = True) -> "LayerQuantizers":
        if mode and self.fp8_payloads is not None:
            self.fp8_payloads.forget_evaluation()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for name in ("fp8_served", "_fp8_quantizers"):
            self.__dict__.pop(name, None)
        if self.fp8_payloads is not None:
            self.fp8_payloads.release()  # of another device or dtype soon
        return super()._apply(fn, recurse)

    def drop_scaling(self) -> None:
        """Remove what `init_scaling` made, and what is kept of the weight as it was cast."""
        super().drop_scaling()
        for name in ("fp8_payloads", "fp8_channels", "fp8_observer"):
            self.__dict__.pop(name, None)
        self.__dict__.pop("_fp8_quantizers", None)
