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

from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.tensor.base import Payloads, QuantizableTensor, map_tensors
from torch_fp8.tensor.producer import LazySource, modifies
from torch_fp8.tensor.quantizer import Quantizer

_aten: Any = torch.ops.aten


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
"""What of torch may see a `LazyQuantizedTensor` as it is: nothing here looks at an element."""
