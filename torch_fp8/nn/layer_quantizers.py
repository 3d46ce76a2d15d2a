"""`LayerQuantizers`: the quantizers of a linear layer, and what they remember between steps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fp8.autograd.current_pass import is_traced, repeats_forward
from torch_fp8.nn.dtensor_layout import LocalOperands, local_operands
from torch_fp8.nn.frozen_storage import FrozenStorage
from torch_fp8.ops.quantize_delayed import History
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.payload_cache import PayloadCache
from torch_fp8.tensor.quantizer import ChannelMaxima, Quantizer, Quantizers, WeightQuantizer


class _Memo(NamedTuple):
    """A layer's quantizers, for as long as it has these.

    Attributes:
        rows: the buffer of its histories.
        of_pass: quantizers, keyed by whether histories are updated and whether a forward repeats.
    """

    rows: Tensor | None
    of_pass: dict[tuple[bool, bool], Quantizers]


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
        """How the operands are cast now; with their histories in eager code and without a group.

        Args:
            group: ranks that have other parts of them; or None.
        """
        updates, repeats = True, False
        if self.fp8_delayed:
            updates, repeats = self.training, repeats_forward()
        # Many objects, which change with these and the histories' buffer alone.
        steady = group is None and not torch.compiler.is_compiling()
        rows = self._buffers.get("fp8_scaling")
        if steady and rows is not None:  # views of it would belong to these
            steady = not (torch.is_inference_mode_enabled() or is_traced())
        memo: _Memo | None = None
        if steady:
            memo = self.__dict__.get("_fp8_quantizers")
            if memo is None or memo.rows is not rows:
                memo = self.__dict__["_fp8_quantizers"] = _Memo(rows, {})
            of_before = memo.of_pass.get((updates, repeats))
            if of_before is not None:
                return of_before
        recipe, config = self.fp8_recipe, self.fp8_config
        weight = Quantizer(recipe.weight, config, group, None, updates, repeats)
        quantizers = Quantizers(
            Quantizer(recipe.input, config, group, None, updates, repeats),
            WeightQuantizer(weight, self.fp8_payloads, self.fp8_transposed),
            Quantizer(recipe.grad_output, config, group),
            self.fp8_channels,
            None if torch.compiler.is_compiling() else self.fp8_observer,
        )
        if memo is not None:
            if self.fp8_delayed:
                buffers = self.operand_buffers()
                with _disable_current_modes():  # a checkpoint would miss them in its second pass
                    of_gradient = History.of_operand(buffers, 2)
                    quantizers = quantizers.with_buffers(buffers)
                gradient = quantizers.grad_output._replace(history=of_gradient)
                quantizers = quantizers._replace(grad_output=gradient)
            memo.of_pass[updates, repeats] = quantizers
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

    def buffers_of(self, quantizers: Quantizers) -> tuple[Any, ...]:
        """The buffers with the histories of quantizers that do not have them yet."""
        known = not self.fp8_delayed or quantizers.input.history is not None
        return () if known else self.operand_buffers()

    def operand_buffers(self) -> tuple[Any, ...]:
        """The same as `scaling_buffers`, sooner where none of them is sharded."""
        own = self._buffers
        buffers = own["fp8_scaling"], own["fp8_grad_scaling"]
        return self.scaling_buffers() if type(buffers[0]) is not Tensor else buffers

    def quantizer(self, operand: int, group: Any = None) -> Quantizer:
        """That of INPUT, WEIGHT or GRAD_OUTPUT, with its history."""
        every = self.quantizers(group)
        quantizer = (every.input, every.weight.quantizer, every.grad_output)[operand]
        if not self.fp8_delayed or quantizer.history is not None:
            return quantizer
        return quantizer._replace(history=History.of_operand(self.operand_buffers(), operand))

    def producer_quantizer(self, operand: int) -> Quantizer | None:
        """Return that of INPUT or GRAD_OUTPUT, if a producer may cast now with its history's scale.

        Not where a group of ranks agrees on one, nor where a forward runs again with the last.
        """
        if not self.fp8_delayed or isinstance(self.weight, DTensor):
            return None
        quantizer = self.quantizer(operand)
        return quantizer if quantizer.casts_by_history else None

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
