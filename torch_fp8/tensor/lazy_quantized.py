"""`LazyQuantizedTensor`: what a norm or an activation function returns before anyone has read it.

Whoever reads it decides what it becomes. An FP8 linear layer asks for its payload, and the producer
writes that directly, from its own inputs, in the layouts that are wanted; the next layer with the
same input (k and v after q, up after gate) finds it made. Everybody else gets a plain tensor, the
very one that the unconverted module returns. So a norm in front of FP8 layers never writes its
16-bit output, one in front of a LoRA adapter writes both, and the last norm of a model the plain
one alone.

Quantized is what the plain tensor would have held, rounded to its dtype: fused and unfused have the
same bytes.

With delayed scaling a producer casts with the scale of its first reader, whose slot it raises in
the same read; each further reader's slot is raised when it reads. A producer that knows the first
reader beforehand casts ahead.

The results live in the activation itself, not in a table on the side: they go when it goes, and
belong to no other tensor. Inputs that were written to in between are noticed.

Gradients are such tensors, too: the backward of SwiGLU returns two.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import QuantizedTensor, quantize_layouts
from torch_fp8.ops.smooth import column_amax, smoothed_layouts
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.scaling import group_amax
from torch_fp8.tensor.base import Payloads, QuantizableTensor, map_tensors
from torch_fp8.tensor.producer import Producer
from torch_fp8.tensor.quantizer import Quantizer
from torch_fp8.tensor.scale_source import OF_TENSOR

_aten: Any = torch.ops.aten


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
            raise RuntimeError(_modifies(self.written_by, self.name))

    def _check_sources(self) -> None:
        if _versions(self.sources) != self.versions:
            raise RuntimeError(
                f"the input of '{self.name}' was modified in place after its forward and before "
                "its output was used, which is computed at its first use; leave the module as it "
                f"is with FP8Config(skip=('{self.name}',))"
            )


def _versions(sources: tuple[Tensor, ...]) -> list[int]:
    return [0 if source.is_inference() else source._version for source in sources]


class LazyQuantizedTensor(QuantizableTensor):
    """(..., C), read-only; see the module.

    Attributes:
        production: its forms, as matrices (R, C); shared with all aliases.
        outer_shape, outer_dtype: those of the tensor, sooner than torch tells those of a subclass.
        connected: the plain tensor for whoever autograd records; each alias has its own.
    """

    production: LazySource
    outer_shape: torch.Size
    outer_dtype: torch.dtype
    connected: Tensor | None = None
    is_nested = is_quantized = False  # every layer asks: here, without __torch_function__

    @staticmethod
    def __new__(
        cls, production: LazySource, shape: Sequence[int], dtype: torch.dtype
    ) -> "LazyQuantizedTensor":
        device, size = production.sources[0].device, torch.Size(shape)
        self: LazyQuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=device
        )
        self.production, self.outer_shape, self.outer_dtype = production, size, dtype
        return self

    def quantize(
        self,
        quantizer: Quantizer,
        *,
        rowwise: bool,
        columnwise: bool,
        grad_output: Tensor | None = None,
    ) -> Payloads:
        """The payloads, made when they are first asked for; see `LazySource`."""
        if not (rowwise or columnwise):
            return None, None
        return self.production.layouts(quantizer, rowwise=rowwise, columnwise=columnwise)

    def amax(self) -> Tensor:
        return self.production.amax()

    def matrix(self) -> Tensor:
        return self.production.dense()

    def before_cast(
        self, row: QuantizedTensor | None, col: QuantizedTensor | None
    ) -> tuple[Tensor, QuantizedTensor | None, QuantizedTensor | None, int]:
        """The plain tensor; where it was never written, it is computed and not kept."""
        source = self.production
        dense = source.forms.dense
        return source.producer.dense() if dense is None else dense, row, col, 0

    def dequantize(self) -> Tensor:
        """The plain tensor, which autograd does not record; see `plain`."""
        # Not a view, so that autograd takes it for a result of its own.
        dense: Tensor = _aten._unsafe_view(self.production.dense(), self.outer_shape)
        return dense

    def alias(self, shape: Sequence[int]) -> "LazyQuantizedTensor":
        return LazyQuantizedTensor(self.production, shape, self.outer_dtype)

    def __repr__(self) -> str:
        return (
            f"LazyQuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"by '{self.production.name}')"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = result = plain(self.detach()).clone()
        return result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Before autograd: whoever is not of ours gets a plain tensor, and saves that.
        kwargs = kwargs or {}
        if func in _KEPT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if _writes(func):
            map_tensors([*args[:1], kwargs.get("input")], _refuse_to_be_written(func))
        if "out" in kwargs:
            map_tensors(kwargs["out"], _refuse_to_be_written(func))
        if kwargs.get("inplace"):  # the result can be read, the activation by no layer any more
            for x in (*args[:1], kwargs.get("input")):
                if isinstance(x, LazyQuantizedTensor):
                    x.production.written_by = func.__name__
        return func(*map_tensors(args, plain), **map_tensors(kwargs, plain))


def plain(x: Any) -> Any:
    """A plain tensor, connected to the producer where autograd records; others as they are."""
    if not isinstance(x, LazyQuantizedTensor):
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.dequantize()
    # Kept, a leaf would hold itself through its gradient's accumulator.
    if x.is_leaf:
        fresh: Tensor = _Plain.apply(x)
        return fresh
    if x.connected is None:
        x.connected = _Plain.apply(x)
    return x.connected


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: LazyQuantizedTensor) -> Tensor:
        return x.dequantize()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _refuse_to_be_written(func: Any) -> Callable[[Any], None]:
    def refuse(x: Any) -> None:
        if isinstance(x, LazyQuantizedTensor):
            raise RuntimeError(_modifies(func.__name__, x.production.name))

    return refuse


def _modifies(func: str, name: str) -> str:
    return (
        f"{func} modifies the output of '{name}' in place, which is kept in FP8; use the operation "
        f"that returns a new tensor, or leave the module as it is with FP8Config(skip=('{name}',))"
    )


_PROPERTIES: tuple[str, ...] = ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn")
_PROPERTIES += ("requires_grad", "grad", "output_nr", "is_cpu", "is_cuda", "is_meta", "is_sparse")
_METHODS: tuple[str, ...] = ("size", "stride", "dim", "ndimension", "numel", "nelement", "__len__")
_METHODS += ("element_size", "get_device", "is_floating_point", "is_complex", "is_contiguous")
_METHODS += ("is_inference", "requires_grad_", "register_hook", "retain_grad", "detach", "__hash__")
_KEPT = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_KEPT |= {getattr(Tensor, name) for name in _METHODS}
_KEPT |= {Tensor.requires_grad.__set__, Tensor.grad.__set__, Tensor.backward}
_KEPT |= {torch.autograd.backward, torch.autograd.grad}
"""What of torch may see a `LazyQuantizedTensor` as it is: nothing here looks at an element."""
