"""Saving attention's output only once, as the FP8 payload that the next layer saves anyway.

Attention saves its result for the softmax's gradient, and the layer that casts the result saves the
payload for its wgrad. Attention's saved tensor is replaced by a `SavedOutput`, which is attached to
the result until a layer casts the same memory::

    attention   saves out (B, S, H, D)         -> SavedOutput, which holds the tensor
    o_proj      casts out as (B S, H D)        -> SavedOutput, which holds the payload (H D, B S)
    backward    decodes and transposes it      -> out (B, S, H, D), rounded

The payload then lives until attention's backward, which follows that of the layer. If no layer
casts the result (another layer lies between, or saves its input in BF16), the tensor stays.

Legend: B batch, H heads, S tokens, D head dimension; M = B S tokens, K = H D features.
"""

from typing import Any

from torch import Tensor

from torch_fp8.ops.quantize import QuantizedTensor, dequantize

SAVED_OUTPUT = "fp8_saved_output"
"""Attribute of attention's result that holds the `SavedOutput`."""


class SavedOutput:
    """A tensor other than q, k and v that attention saved.

    Args:
        tensor: saved tensor of any shape.
        outer: pack and unpack hooks around attention, which also apply to the payload.
    """

    def __init__(self, tensor: Tensor, outer: tuple[Any, Any]) -> None:
        self._tensor: Tensor | None = tensor
        self._version, self._outer = tensor._version, outer
        self._size, self._stride, self._dtype = tensor.size(), tensor.stride(), tensor.dtype
        self._payload: tuple[Any, Any, Any] | None = None
        self._other: Any = None

    def follow(self, result: Any) -> None:
        """Attach this to attention's result if that is the saved tensor; else pack the tensor.

        Args:
            result: return value of attention.
        """
        saved = self._tensor
        assert saved is not None
        if isinstance(result, Tensor) and _storage(result) == _storage(saved):
            vars(_root(result))[SAVED_OUTPUT] = self
        else:
            self._other, self._tensor = self._outer[0](saved), None

    def take(self, x: Tensor, payload: QuantizedTensor) -> None:
        """Keep a payload instead of the tensor, if the payload was cast from this tensor.

        Args:
            x: (..., K), input of the cast.
            payload: (K, M), quantized along M.
        """
        saved = self._tensor
        if saved is None or x._version != self._version or not x.is_contiguous():
            return
        if (x.data_ptr(), x.numel(), x.dtype) != (saved.data_ptr(), saved.numel(), saved.dtype):
            return
        if not _is_dense(saved):
            return
        pack = self._outer[0]
        self._payload = pack(payload.qdata), pack(payload.scale), payload.granularity
        self._tokens, self._tensor = x.numel() // x.shape[-1], None

    def unpack(self) -> Tensor:
        """Return the saved tensor, or the dequantized payload if a layer has left one.

        Raises:
            RuntimeError: the tensor was modified in place after attention saved it.
        """
        if self._payload is not None:
            qdata, scale, granularity = self._payload
            unpack = self._outer[1]
            decoded = dequantize(QuantizedTensor(unpack(qdata), unpack(scale), granularity))
            features = decoded.t()[: self._tokens]  # (K, M padded) -> (M, K)
            rows = features.new_empty(features.shape, dtype=self._dtype).copy_(features)
            return rows.as_strided(self._size, self._stride)
        if self._tensor is None:
            other: Tensor = self._outer[1](self._other)
            return other
        tensor = self._tensor
        if tensor._version != self._version:
            raise RuntimeError(
                "a tensor that attention needs for its gradient has been modified by an in-place "
                "operation"
            )
        return tensor


def _root(x: Tensor) -> Tensor:
    """Return the base of a view, or x itself. All views can find attributes of their base."""
    base: Tensor | None = x._base
    return x if base is None else base


def _storage(x: Tensor) -> int:
    return id(x.untyped_storage())  # torch keeps this object while the memory exists


def _is_dense(x: Tensor) -> bool:
    """Return whether the elements fill one range of memory, in any order of the dimensions."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return last + 1 == x.numel()
