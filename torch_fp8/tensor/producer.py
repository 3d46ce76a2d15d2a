"""`Producer` computes the result of a norm or activation function in the form that a reader needs.

`LazySource` makes it compute each form only once.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import QuantizedTensor, quantize_layouts
from torch_fp8.ops.smooth import column_amax, smoothed_layouts
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.scaling import OF_TENSOR, group_amax
from torch_fp8.tensor.base import Payloads
from torch_fp8.tensor.quantizer import Quantizer, is_opaque


class Producer:
    """Computes a result (R, C) in the forms that readers need.

    It must not refer to its `LazySource`: the cycle would keep both until garbage collection.

    Attributes:
        channel_amax: function that returns the largest magnitude of each channel, (C,) float32, or
            None to compute it from the plain tensor.
        smoothed: function that casts the channels times factors (C,) float32, or None to cast the
            plain tensor.
    """

    channel_amax: Callable[[], Tensor] | None = None
    smoothed: Callable[[Tensor, CastOptions], Payloads] | None = None

    def dense(self) -> Tensor:
        """Return the plain tensor (R, C)."""
        raise NotImplementedError

    def layouts(self, options: CastOptions) -> Payloads:
        """Return the payloads for `options`, as `quantize_layouts` does for the plain tensor."""
        raise NotImplementedError

    def amax(self) -> Tensor:
        """Return the largest magnitude of the plain tensor, () float32, as `tensor_amax` does."""
        raise NotImplementedError

    def own_parameter(self) -> Tensor | None:
        """Replace the parameter that it reads, if there is one, by a copy, and return the copy."""
        return None


_unread: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Results that may not be computed yet, and read parameters."""
_hooks: list[Any] = []


def await_step(result: Any) -> None:
    """Call ``result.own_parameter()`` before the next step of any optimizer."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(own_parameters))
    _unread.add(result)


def own_parameters(*_: Any, written: Tensor | None = None) -> None:
    """Have results that are not computed yet copy their parameters, before these are written.

    Code may keep a result, for example in a forward hook, and read it after a step. In most loops
    no such result exists by then.

    Args:
        written: parameter that is written, or None for a step, which writes all that are trained.
    """
    for source in list(_unread):
        source.own_parameter(written)
    if written is None:
        _unread.clear()


class LazySource:
    """One result of a producer. It computes each form at its first use and caches it.

    Args:
        name: qualified name of the producing module, for errors.
        sources: inputs of the producer, which must not be written to meanwhile. An optimizer may
            write to `parameter` (`own_parameters`).
        producer: object that computes the forms.
        on_read: function that gets the quantizer of the first reader with delayed scaling, or None.
        parameter: one of `sources` that an optimizer may train, or None.

    Attributes:
        plain: plain tensor (R, C), or None.
        payloads: payloads by their cast.
        largest: largest magnitude, or None.
        raised: slots that were raised to the amax.
        half: result (R, 2 C) that contains this one, and the index of this half; or None.
    """

    written_by: str | None = None
    plain: Tensor | None = None
    largest: Tensor | None = None
    half: "tuple[LazySource, int] | None" = None

    def __init__(
        self,
        name: str,
        sources: tuple[Tensor, ...],
        producer: Producer,
        on_read: Callable[[Quantizer], None] | None = None,
        parameter: Tensor | None = None,
    ) -> None:
        self.name, self.sources, self.producer, self.on_read = name, sources, producer, on_read
        self.versions = _versions(sources)
        self.payloads: dict[CastSpec, Payloads] = {}
        self.raised: list[Tensor] = []
        self.parameter = parameter
        if parameter is not None:
            await_step(self)

    def own_parameter(self, written: Tensor | None = None) -> None:
        """Copy the parameter, unless the result exists or can no longer be computed.

        Args:
            written: parameter that is written, or None for all that are trained.
        """
        parameter: Any = self.parameter
        if written is not None and written is not parameter:
            return
        if self.plain is not None or _versions(self.sources) != self.versions:
            return
        if parameter.untyped_storage().nbytes():  # FSDP2 frees gathered weights
            copy: Any = self.producer.own_parameter()
            self.sources = tuple(copy if x is parameter else x for x in self.sources)
            self.versions = _versions(self.sources)

    def dense(self) -> Tensor:
        """Return the plain tensor (R, C)."""
        if self.plain is None:
            self._check_sources()
            self.plain = self.producer.dense()
        return self.plain

    def amax(self) -> Tensor:
        """Return the largest magnitude, () float32; NaN if any element is NaN."""
        self._check_written()
        if self.largest is None:
            self.largest = self.producer.amax()
        return self.largest

    def channel_amax(self) -> Tensor:
        """Return the largest magnitude of each channel, (C,) float32."""
        self._check_written()
        channel_amax = self.producer.channel_amax
        if self.plain is None and channel_amax is not None:
            self._check_sources()
            return channel_amax()
        return column_amax(self.dense())

    def smoothed(self, factors: Tensor, options: CastOptions) -> Payloads:
        """Quantize the channels times factors (C,) float32, without caching."""
        self._check_written()
        smoothed = self.producer.smoothed
        if self.plain is None and smoothed is not None:
            self._check_sources()
            return smoothed(factors, options)
        return smoothed_layouts(self.dense(), factors, options)

    def layouts(self, quantizer: Quantizer, *, rowwise: bool, columnwise: bool) -> Payloads:
        """Quantize the result, or return cached payloads.

        Args:
            quantizer: quantizer of the reader. The first reader's tensorwise scale is used for all.
                With ``graph_scales="last_step"`` only its slot is raised, see `shared_amaxes`.
            rowwise, columnwise: whether to return (R, C), and the transpose (C, R).
        """
        if self.written_by is not None:
            self._check_written()
        slot = quantizer.source.slot
        if self.on_read is not None and quantizer.source is not OF_TENSOR:
            self.on_read(quantizer)
            self.on_read = None
        old_row, old_col = self.payloads.get(quantizer.spec, (None, None))
        new_row, new_col = rowwise and old_row is None, columnwise and old_col is None
        if new_row or new_col:
            options = self._options(quantizer, old_row or old_col, new_row, new_col)
            if self.plain is None:
                self._check_sources()
                made_row, made_col = self.producer.layouts(options)
            else:
                made_row, made_col = quantize_layouts(self.plain, options)
            if options.scale is not None and options.amax is not None:
                self._note(options.amax)
            old_row, old_col = old_row or made_row, old_col or made_col
            self.payloads[quantizer.spec] = old_row, old_col
        follows = not (new_row or new_col or quantizer.spec.delayed) and bool(self.raised)
        if slot is not None and not follows and not any(raised is slot for raised in self.raised):
            quantizer.source.record(self.amax())
            self.raised.append(slot)
        return old_row if rowwise else None, old_col if columnwise else None

    def _options(
        self, quantizer: Quantizer, other: QuantizedTensor | None, rowwise: bool, columnwise: bool
    ) -> CastOptions:
        """Return the options for casting a missing layout.

        Args:
            other: cached layout, whose tensorwise scale serves both, or None if there is none.
        """
        spec, scale, slot = quantizer.spec, quantizer.source.scale, quantizer.source.slot
        layouts = {"rowwise": rowwise, "columnwise": columnwise}
        if spec.granularity != "tensorwise":
            return CastOptions.of(spec, **layouts)
        if other is not None:
            return CastOptions.of(spec, other.scale, **layouts)
        if scale is None and quantizer.group is not None:
            return CastOptions.of(spec, None, group_amax(self.amax(), quantizer.group), **layouts)
        slot = None if scale is None or is_opaque(self.sources[0]) else slot
        return CastOptions.of(spec, scale, slot, **layouts)

    def _note(self, slot: Tensor) -> None:
        """Note that a cast raised a slot; other readers' slots are raised to the same amax."""
        self.raised.append(slot)
        if self.largest is None:
            self.largest = slot.view(torch.float32)

    def rowwise(self, quantizer: Quantizer) -> QuantizedTensor:
        """Return the rowwise payload of `layouts`, faster if it is cached."""
        row, _ = self.payloads.get(quantizer.spec, (None, None))
        if row is None or self.written_by is not None:
            row, _ = self.layouts(quantizer, rowwise=True, columnwise=False)
            assert row is not None
        return row

    def keep(self, quantizer: Quantizer, payloads: Payloads) -> None:
        """Cache payloads that were computed in advance.

        Args:
            quantizer: quantizer of the reader for which they were computed.
            payloads: its payloads (R, C) and (C, R), each one or None.
        """
        self.payloads[quantizer.spec] = payloads
        if quantizer.source.scale is not None and quantizer.source.slot is not None:
            self._note(quantizer.source.slot)

    def _check_written(self) -> None:
        if self.written_by is not None:
            raise RuntimeError(modifies(self.written_by, self.name))

    def _check_sources(self) -> None:
        if _versions(self.sources) != self.versions:
            raise RuntimeError(
                f"the input of '{self.name}' was modified in place after its forward but before "
                "its output, which is computed at first use, was used; leave the module "
                f"unconverted with FP8Config(skip=('{self.name}',))"
            )


def _versions(sources: tuple[Tensor, ...]) -> list[int]:
    try:
        return [source._version for source in sources]
    except RuntimeError:  # tensors of inference mode have no version
        return [0 if source.is_inference() else source._version for source in sources]


def modifies(func: str, name: str) -> str:
    """Return the error message for in-place writes to the output of a module."""
    return (
        f"{func} modifies the output of '{name}' in place, which is stored in FP8; use the "
        "operation that returns a new tensor, or leave the module unconverted with "
        f"FP8Config(skip=('{name}',))"
    )
