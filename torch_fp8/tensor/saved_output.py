"""Attention's output, which the layer behind it keeps in FP8 anyway: kept once, for both.

Attention saves its result for the softmax's gradient, and the layer that casts it saves the payload
for its wgrad. A `SavedOutput` is packed in place of the former, and lies with the tensor that
attention returns until a layer casts this very memory::

    attention   saves out (B, S, H, D)         -> SavedOutput, which holds the tensor
    o_proj      casts out as (B S, H D)        -> SavedOutput, which holds the payload (H D, B S)
    backward    decodes and transposes it      -> out (B, S, H, D), rounded

The payload then lives until attention's backward, right behind the layer's. Where no layer takes
it (another one lies between, or the layer saves its input in BF16), the tensor stays.

Legend: B batch, H heads, S tokens, D head dimension; M = B S tokens, K = H D features.
"""

from typing import Any

from torch import Tensor

from torch_fp8.ops.quantize import QuantizedTensor, dequantize

SAVED_OUTPUT = "fp8_saved_output"
"""The attribute of attention's result that has its `SavedOutput`."""


class SavedOutput:
    """What attention has saved beside its operands.

    Args:
        tensor: saved by attention, any shape.
        outer: pack and unpack hooks around attention, which a payload goes through.
    """

    def __init__(self, tensor: Tensor, outer: tuple[Any, Any]) -> None:
        self._tensor: Tensor | None = tensor
        self._version, self._outer = tensor._version, outer
        self._size, self._stride, self._dtype = tensor.size(), tensor.stride(), tensor.dtype
        self._payload: tuple[Any, Any, Any] | None = None
        self._other: Any = None

    def follow(self, result: Any) -> None:
        """Lie with what attention returns, if that is the tensor; else it goes to the outer hooks.

        Args:
            result: attention's, the same for all that it has saved.
        """
        saved = self._tensor
        assert saved is not None
        if isinstance(result, Tensor) and _storage(result) == _storage(saved):
            vars(_root(result))[SAVED_OUTPUT] = self
        else:
            self._other, self._tensor = self._outer[0](saved), None

    def take(self, x: Tensor, payload: QuantizedTensor) -> None:
        """Hold the payload instead of the tensor, if it was cast from this tensor.

        Args:
            x: (..., K), cast.
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
        """Return the tensor; the values of the payload where a layer has left one.

        Raises:
            RuntimeError: somebody wrote to the tensor after attention had saved it.
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
    """Return the tensor of which x is a view, or x: attributes of that are found from all views."""
    base: Tensor | None = x._base
    return x if base is None else base


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_dense(x: Tensor) -> bool:
    """Return whether the elements fill one range of memory, in any order of the dimensions."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return last + 1 == x.numel()
