"""`LazyQuantizedTensor`: the output of a norm or activation function, computed when it is read.

The reader decides its form. An FP8 linear layer asks for a payload, which the producer computes
directly from its own inputs, in the requested layouts. The next layer with the same input (k and v
after q, up after gate) reuses it. All other code gets a plain tensor with the values that the
unconverted module returns. So a norm in front of FP8 layers never writes its 16-bit output, one in
front of a LoRA adapter writes both forms, and the last norm of a model only the plain one.

The payload is the cast of the plain tensor, rounded to its dtype first, so that fused and unfused
casts give the same bytes.

With delayed scaling, a producer casts with the scale of its first reader and raises that reader's
slot in the same pass. It raises the slots of later readers when they read. If the producer already
knows the first reader, it casts in forward.

The results are attributes of the activation, so they are freed with it and cannot be confused with
those of another tensor. If the producer's inputs were modified in between, reading raises an error.

Gradients can be such tensors, too: the backward of SwiGLU returns two.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fp8.tensor.base import Payloads, QuantizableTensor, map_tensors, wrapper
from torch_fp8.tensor.producer import LazySource, modifies
from torch_fp8.tensor.quantizer import Quantizer, matrix, source_of, with_source

_aten: Any = torch.ops.aten


class LazyQuantizedTensor(QuantizableTensor):
    """A read-only tensor (..., C); see the module docstring.

    Attributes:
        production: source of its forms, as matrices (R, C); shared with all aliases.
        outer_shape, outer_dtype: shape and dtype, which are faster to read than ``x.shape``.
        connected: plain tensor with a path to the producer in autograd's graph; each alias has its
            own.
        reads: weak references to reads by groups of layers (`torch_fp8.nn.input_group`), by group;
            each alias has its own.
    """

    production: LazySource
    outer_shape: torch.Size
    outer_dtype: torch.dtype
    connected: Tensor | None = None
    reads: dict[Any, Any] | None = None
    # Every layer reads these; class attributes avoid __torch_function__.
    is_nested = is_quantized = False
    layout = torch.strided

    @property
    def device(self) -> torch.device:
        return self.production.sources[0].device

    @staticmethod
    def __new__(
        cls, production: LazySource, shape: Sequence[int], dtype: torch.dtype
    ) -> "LazyQuantizedTensor":
        device, size = production.sources[0].device, torch.Size(shape)
        self: LazyQuantizedTensor = wrapper(cls, size, dtype, device)
        self.production, self.outer_shape, self.outer_dtype = production, size, dtype
        return self

    def quantize(
        self,
        quantizer: Quantizer,
        *,
        rowwise: bool,
        columnwise: bool,
        after: Tensor | None = None,
    ) -> Payloads:
        """Return the requested payloads, computed at their first use; see `LazySource`."""
        if not (rowwise or columnwise):
            return None, None
        return self.production.layouts(quantizer, rowwise=rowwise, columnwise=columnwise)

    def amax(self) -> Tensor:
        return self.production.amax()

    def matrix(self) -> Tensor:
        return self.production.dense()

    def before_cast(self, payloads: Payloads) -> tuple[Tensor, Payloads, int]:
        """Return the plain matrix (R, C); if it does not exist yet, it is not kept."""
        source = self.production
        dense = source.producer.dense() if source.plain is None else source.plain
        return dense, payloads, 0

    def dequantize(self) -> Tensor:
        """Return the plain tensor without a graph; see `plain`."""
        # Not a view, so that autograd accepts it as a custom function's result: (R, C) -> (..., C).
        return _aten._unsafe_view(self.production.dense(), self.outer_shape)

    def reshaped(self, shape: Sequence[int]) -> "LazyQuantizedTensor":
        return LazyQuantizedTensor(self.production, shape, self.outer_dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), plain(self.detach()).clone())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # This runs before autograd, so that other operators get, and save, a plain tensor.
        kwargs = kwargs or {}
        if func in _KEPT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if _writes(func):
            map_tensors([*args[:1], kwargs.get("input")], _refuse_to_be_written(func))
        if "out" in kwargs:
            map_tensors(kwargs["out"], _refuse_to_be_written(func))
        if kwargs.get("inplace"):  # the result is valid, but the activation is overwritten
            for x in (*args[:1], kwargs.get("input")):
                if isinstance(x, LazyQuantizedTensor):
                    x.production.written_by = func.__name__
        return func(*map_tensors(args, plain), **map_tensors(kwargs, plain))


def plain(x: Any) -> Any:
    """Return a plain tensor, connected to the producer in autograd; other values unchanged."""
    if not isinstance(x, LazyQuantizedTensor):
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.dequantize()
    # Not cached for a leaf, which would hold itself through its gradient accumulator.
    if x.is_leaf:
        return _Plain.apply(x)
    if x.connected is None:
        x.connected = _Plain.apply(x)
    return x.connected


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return results (..., C) as one matrix (R, C1 + C2 + ...).

    It is computed when it is read, if the parts are the halves of one result.
    """
    if len(parts) == 1:
        return parts[0]
    sources = [x.production if isinstance(x, LazyQuantizedTensor) else source_of(x) for x in parts]
    halves = [None if source is None else source.half for source in sources]
    whole = None if halves[0] is None else halves[0][0]
    if whole is None or halves != [(whole, 0), (whole, 1)]:
        return torch.cat([matrix(plain(x)) for x in parts], 1)
    first = parts[0]
    if isinstance(first, LazyQuantizedTensor):
        rows, cols = first.outer_shape[:-1].numel(), first.outer_shape[-1]
        return LazyQuantizedTensor(whole, (rows, 2 * cols), first.outer_dtype)
    return with_source(torch.cat([matrix(x) for x in parts], 1), whole)


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
            raise RuntimeError(modifies(func.__name__, x.production.name))

    return refuse


_PROPERTIES: tuple[str, ...] = ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn")
_PROPERTIES += ("requires_grad", "grad", "output_nr", "is_cpu", "is_cuda", "is_meta", "is_sparse")
_METHODS: tuple[str, ...] = ("size", "stride", "dim", "ndimension", "numel", "nelement", "__len__")
_METHODS += ("element_size", "get_device", "is_floating_point", "is_complex", "is_contiguous")
_METHODS += ("is_inference", "requires_grad_", "register_hook", "retain_grad", "detach", "__hash__")
_KEPT = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_KEPT |= {getattr(Tensor, name) for name in _METHODS}
_KEPT |= {Tensor.requires_grad.__set__, Tensor.grad.__set__, Tensor.backward}
_KEPT |= {torch.autograd.backward, torch.autograd.grad}
"""Functions of torch that get a `LazyQuantizedTensor` itself, because they read no element."""
