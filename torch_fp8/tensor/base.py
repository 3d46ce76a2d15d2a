"""`QuantizableTensor`: a tensor that has FP8 payloads, or makes them on demand.

Examples are the output of a converted norm or MLP (`torch_fp8.tensor.lazy_quantized`), an
activation that a group of ranks gathered as FP8 bytes
(`torch_fp8.distributed.tensor_parallel.all_gather`), a weight that FSDP2 gathered in FP8
(`torch_fp8.distributed.fsdp.unsharded_weight`), and a frozen weight
(`torch_fp8.tensor.frozen_weight`). A linear layer passes its operands to a
`torch_fp8.tensor.quantizer.Quantizer`, which asks them for their payloads. All other code gets a
plain tensor of the advertised dtype.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fp8.autograd.current_pass import stand_in
from torch_fp8.ops.quantize import Payloads, QuantizedTensor
from torch_fp8.quantization.payload_shape import padded_rows, scale_shape
from torch_fp8.quantization.scaling import tensor_amax

_aten: Any = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


class QuantizableTensor(Tensor):
    """A tensor (..., C) with FP8 payloads, which a subclass computes.

    Aliases, and views that keep the last dimension, share the payloads.

    Attributes:
        views: operators that may return such a view.
    """

    views: tuple[Any, ...] = _VIEWS

    def quantize(
        self,
        quantizer: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        after: Tensor | None = None,
    ) -> Payloads:
        """Return the requested payloads ``(rowwise, columnwise)``, each one or None.

        Args:
            quantizer: `torch_fp8.tensor.quantizer.Quantizer` of the layer that reads this tensor.
            rowwise: whether to return the matrix (R, C) quantized along C.
            columnwise: whether to return its transpose (C, R) quantized along R.
            after: a tensor of backward, if this is a weight there; see
                `torch_fp8.ops.quantize.transposed`.
        """
        raise NotImplementedError

    def stacked_payload(self, flip: bool) -> tuple[Tensor, Tensor]:
        """Return codes (E, R, C) of stacked weights and scales (E, R, 1) of their rows.

        It returns tensors only, because torch.compile treats this method as a single node.

        Args:
            flip: whether to return codes (E, C, R) and scales (E, C, 1) of the transposes.
        """
        raise NotImplementedError

    def amax(self) -> Tensor:
        """Return the largest magnitude, () float32; NaN if any element is NaN."""
        return tensor_amax(self.dequantize())

    def dequantize(self) -> Tensor:
        """Return a plain tensor of this shape and dtype."""
        raise NotImplementedError

    def matrix(self) -> Tensor:
        """Return a plain tensor (R, C)."""
        plain = self.dequantize()
        return plain.reshape(-1, plain.shape[-1])

    def saved_for_backward(self) -> "tuple[Tensor, Tensor | None, SavedInput] | None":
        """Return the tensors that a layer saves for wgrad if this is its input.

        Returns:
            One or two tensors (the second may be None), and the object that turns them into a
            payload in backward, or None to save the payload that the layer makes.
        """
        return None

    def before_cast(self, payloads: Payloads) -> "tuple[Tensor, Payloads, int] | None":
        """Return the high-precision matrix that this rank cast, for a monitor to compare.

        Args:
            payloads: payloads (R, C) and (C, R) of this tensor that GEMMs multiply, or None.
        Returns:
            The matrix, the payloads that contain it, and the index of its first row in them, or
            None if the matrix no longer exists.
        """
        return None

    def reshaped(self, shape: Sequence[int]) -> "QuantizableTensor":
        """Return this tensor in another shape with the same last dimension."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def refuse_write(cls, func: Any, args: Any, kwargs: Any) -> None:
        """Raise RuntimeError if `func` would write to such a tensor."""

    @classmethod
    @torch._disable_dynamo  # imports torch._dynamo at the first call
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        if isinstance(x, cls):
            shape = view_shape(func, x, args)
            if shape is not None:
                return x.reshaped(shape)
        cls.refuse_write(func, args, kwargs)
        return func(*map_tensors(args, dequantized), **map_tensors(kwargs, dequantized))


class SavedInput:
    """Computes in backward the payload of an input from the tensors that the layer saved."""

    def start(self, qdata: Tensor, scale: Tensor | None) -> None:
        """Start slow work, such as a collective, before the rest of backward."""

    def columnwise(self, qdata: Tensor, scale: Tensor | None) -> QuantizedTensor:
        """Return the transposed input (K, M), quantized along M.

        Args:
            qdata, scale: saved tensors.
        """
        raise NotImplementedError


def input_stand_ins(
    row: QuantizedTensor, fp8: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return stand-ins for the saved transposed payload and scale of an input, or the input."""
    tokens, features = row.qdata.shape
    if not fp8:
        return stand_in((tokens, features), dtype, row.qdata), None
    tokens = padded_rows(tokens, row.granularity)
    qdata = stand_in((features, tokens), row.qdata.dtype, row.qdata)
    if row.granularity == "tensorwise":
        return qdata, row.scale
    shape = scale_shape(features, tokens, row.granularity)
    return qdata, stand_in(shape, torch.float32, row.qdata)


def wrapper(cls: Any, shape: Any, dtype: torch.dtype, device: Any, **layout: Any) -> Any:
    """Return a new tensor of a subclass, which has no memory of its own.

    Args:
        cls: the subclass.
        shape, dtype, device: what the tensor reads as.
        layout: ``strides`` and ``storage_offset``, if not those of a new tensor.
    """
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, **layout)


def view_shape(func: Any, x: QuantizableTensor, args: tuple[Any, ...]) -> torch.Size | None:
    """Return the new shape if `func` makes a view that keeps the last dimension; else None."""
    with torch._C.DisableTorchFunctionSubclass():
        shape, numel = x.shape, x.numel()
    if func in _ALIASES:
        return shape
    if func not in x.views:
        return None
    size = list(args[1])
    if -1 in size and numel:
        size[size.index(-1)] = numel // -math.prod(size)
    keeps = bool(size) and size[-1] == shape[-1] and math.prod(size) == numel
    return torch.Size(size) if keeps else None


def map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to every item of the lists, tuples and dictionaries in `value`."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map_tensors(v, function) for v in value)
    if type(value) is dict:
        return {k: map_tensors(v, function) for k, v in value.items()}
    return function(value)


def dequantized(value: Any) -> Any:
    """Dequantize a `QuantizableTensor`; return any other value unchanged."""
    return value.dequantize() if isinstance(value, QuantizableTensor) else value


def in_shared_memory(tensor: Tensor) -> bool:
    """Return whether other processes may write to a tensor, so that nothing derived from it lasts.

    Version numbers count the writes of one process. Processes share our tensors only on the CPU.
    """
    if not tensor.is_cpu or torch.compiler.is_compiling():  # compiled code derives it anew
        return False
    return tensor.is_shared()
