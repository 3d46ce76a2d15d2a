"""`Producer`: what computes the result of a norm or an activation function, as it is asked for; and
`LazySource`, which has it make each form once.
"""

from collections.abc import Callable

from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import QuantizedTensor, quantize_layouts
from torch_fp8.ops.smooth import column_amax, smoothed_layouts
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.scaling import group_amax
from torch_fp8.tensor.base import Payloads
from torch_fp8.tensor.quantizer import Quantizer
from torch_fp8.tensor.scale_source import OF_TENSOR


class Producer:
    """Computes a result, (R, C), in the forms that readers ask for, from what it holds.

    It must not hold the `LazySource` that it is given to: a cycle would keep all of it until it is
    collected.

    Attributes:
        channel_amax: returns the largest magnitude of each channel, (C,) float32; None: it is found
            in the plain tensor.
        smoothed: casts the channels times factors, (C,) float32; None: the plain tensor's.
    """

    channel_amax: Callable[[], Tensor] | None = None
    smoothed: Callable[[Tensor, CastOptions], Payloads] | None = None

    def dense(self) -> Tensor:
        """Return the plain tensor (R, C)."""
        raise NotImplementedError

    def layouts(self, options: CastOptions) -> Payloads:
        """Cast as told, as `quantize_layouts` does."""
        raise NotImplementedError

    def amax(self) -> Tensor:
        """Return the largest magnitude of the plain tensor, () float32, as `tensor_amax`."""
        raise NotImplementedError


class _Forms:
    """What was made of a result.

    Attributes:
        dense, layouts, amax: it.
        slots: those that were raised to the amax.
    """

    dense: Tensor | None = None
    amax: Tensor | None = None

    def __init__(self) -> None:
        self.layouts: dict[CastSpec, Payloads] = {}
        self.slots: list[Tensor] = []


class LazySource:
    """One result of a producer: each form of it is made when it is first asked for.

    Args:
        name: qualified name of the producing module, for errors.
        sources: what the forms are made from; not to be written to meanwhile.
        producer: makes them.
        on_read: told of the quantizer of who reads first with delayed scaling.

    Attributes:
        forms: the forms that were made so far.
    """

    written_by: str | None = None

    def __init__(
        self,
        name: str,
        sources: tuple[Tensor, ...],
        producer: Producer,
        on_read: Callable[[Quantizer], None] | None = None,
    ) -> None:
        self.name, self.sources, self.producer, self.on_read = name, sources, producer, on_read
        self.versions = _versions(sources)
        self.forms = _Forms()

    def dense(self) -> Tensor:
        """The plain tensor, (R, C)."""
        forms = self.forms
        if forms.dense is None:
            self._check_sources()
            forms.dense = self.producer.dense()
        return forms.dense

    def amax(self) -> Tensor:
        """Return the largest magnitude, () float32; NaN if any element is."""
        self._check_written()
        forms = self.forms
        if forms.amax is None:
            forms.amax = self.producer.amax()
        return forms.amax

    def channel_amax(self) -> Tensor:
        """Return the largest magnitude of each channel, (C,) float32."""
        self._check_written()
        dense = self.forms.dense
        channel_amax = self.producer.channel_amax
        if dense is None and channel_amax is not None:
            self._check_sources()
            return channel_amax()
        return column_amax(self.dense())

    def smoothed(self, factors: Tensor, options: CastOptions) -> Payloads:
        """Quantize the channels times factors (C,) float32; it is not kept."""
        self._check_written()
        dense = self.forms.dense
        smoothed = self.producer.smoothed
        if dense is None and smoothed is not None:
            self._check_sources()
            return smoothed(factors, options)
        return smoothed_layouts(self.dense(), factors, options)

    def layouts(self, quantizer: Quantizer, *, rowwise: bool, columnwise: bool) -> Payloads:
        """Quantize the plain tensor, or return what was made before.

        Args:
            quantizer: the reader's; who asks first decides on a tensorwise scale for all.
            rowwise, columnwise: the layouts to return.
        """
        if self.written_by is not None:
            self._check_written()
        forms, slot = self.forms, quantizer.source.slot
        if self.on_read is not None and quantizer.source is not OF_TENSOR:
            self.on_read(quantizer)
            self.on_read = None
        old_row, old_col = forms.layouts.get(quantizer.spec, (None, None))
        new_row, new_col = rowwise and old_row is None, columnwise and old_col is None
        if new_row or new_col:
            options = self._options(quantizer, old_row or old_col, new_row, new_col)
            made_row, made_col = self._make(options)
            if options.scale is not None and options.amax is not None:
                self._note(options.amax)
            old_row, old_col = old_row or made_row, old_col or made_col
            forms.layouts[quantizer.spec] = old_row, old_col
        if slot is not None and not any(raised is slot for raised in forms.slots):
            quantizer.source.record(self.amax())
            forms.slots.append(slot)
        return old_row if rowwise else None, old_col if columnwise else None

    def _options(
        self, quantizer: Quantizer, other: QuantizedTensor | None, rowwise: bool, columnwise: bool
    ) -> CastOptions:
        """Return the cast of a layout that is missing.

        Args:
            other: the layout that is there, whose tensorwise scale serves both.
        """
        spec, scale, slot = quantizer.spec, quantizer.source.scale, quantizer.source.slot
        layouts = {"rowwise": rowwise, "columnwise": columnwise}
        if spec.granularity != "tensorwise":
            return CastOptions.of(spec, **layouts)
        if other is not None:
            return CastOptions.of(spec, other.scale, **layouts)
        if scale is None and quantizer.group is not None:
            return CastOptions.of(spec, None, group_amax(self.amax(), quantizer.group), **layouts)
        return CastOptions.of(spec, scale, None if scale is None else slot, **layouts)

    def _note(self, slot: Tensor) -> None:
        """Remember that a cast has raised a slot, which other readers' slots are raised to."""
        self.forms.slots.append(slot)
        if self.forms.amax is None:
            self.forms.amax = slot

    def rowwise(self, quantizer: Quantizer) -> QuantizedTensor:
        """Return the rowwise payload of `layouts`, sooner where it was made before."""
        row, _ = self.forms.layouts.get(quantizer.spec, (None, None))
        if row is None or self.written_by is not None:
            row, _ = self.layouts(quantizer, rowwise=True, columnwise=False)
            assert row is not None
        return row

    def keep(self, quantizer: Quantizer, made: Payloads) -> None:
        """Take payloads that were made beforehand.

        Args:
            quantizer: the reader's for which they were made.
            made: the payloads.
        """
        self.forms.layouts[quantizer.spec] = made
        if quantizer.source.scale is not None and quantizer.source.slot is not None:
            self._note(quantizer.source.slot)

    def _make(self, options: CastOptions) -> Payloads:
        dense = self.forms.dense
        if dense is not None:
            return quantize_layouts(dense, options)
        self._check_sources()
        return self.producer.layouts(options)

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
    return [0 if source.is_inference() else source._version for source in sources]


def modifies(func: str, name: str) -> str:
    """Return the message for who writes to the output of a module."""
    return (
        f"{func} modifies the output of '{name}' in place, which is stored in FP8; use the "
        "operation that returns a new tensor, or leave the module unconverted with "
        f"FP8Config(skip=('{name}',))"
    )
