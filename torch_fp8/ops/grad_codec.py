"""Encoding, accumulation and decoding of gradients with 8 bits per element.

To accumulate micro-batches, the stored sum is decoded, added to and encoded again, a few rows at a
time. Every encoding rounds stochastically with new random bits, so the expectation of the stored
sum is the exact sum. Rounding to nearest would lose components that are the same in each
micro-batch; random bits that depend on earlier ones would make the sum biased
(benchmarks/results/accumulation.csv).

On CUDA these functions call `kernels.grad_codec`, with the same bytes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import GradientParts
from torch_fp8.ops.hardware import refuse_capture
from torch_fp8.quantization.block_scaled import BlockScaled, decode, encode, num_groups, row_parts
from torch_fp8.quantization.formats import GRADIENT
from torch_fp8.quantization.stochastic_rounding import (
    element_index,
    random_words,
    shifted_keys,
    stream_keys,
)

_SCALE_ONE, _SCALE_NAN = 127, 255
_NORM_ELEMENTS = (1 << 20, 1 << 24)
"""The number of elements decoded at a time for a norm, on the CPU and on CUDA: what fits a CPU's
caches; 64 MiB on CUDA, for fewer launches.
"""

Keys = tuple[int, int]


class Rounding:
    """The sequence of random bits for a gradient's roundings.

    Args:
        counters: a function that returns the stream's key: seed, step, parameter, ...
        offset: the index of this shard's first element in the whole tensor.
        rank: the rank whose gradient it is. Ranks round their own sums with different bits, so that
            the noise averages out, and averages with the same bits.
    Attributes:
        count: the number of roundings since the gradient was zero, or the last average over ranks.
        exchanges: the number of averages over ranks since it was zero.
    """

    def __init__(
        self,
        counters: Callable[[], tuple[int, ...]] = tuple,
        offset: int = 0,
        rank: int = 0,
    ) -> None:
        self.counters, self.offset, self.rank = counters, offset, rank
        self.count = self.exchanges = 0

    def reset(self) -> None:
        """Start again, because the gradient is zero."""
        self.count = self.exchanges = 0

    def next(self) -> Keys:
        """Return the keys of the next rounding; those of an average are equal on all ranks."""
        self.count += 1
        if self.exchanges:
            return self._keys(-1, self.exchanges, self.count)
        return self._keys(self.rank, self.count)

    def next_exchanged(self) -> Keys:
        """Return the keys for rounding an average over ranks, equal on all of them."""
        self.exchange()
        return self._keys(-1, self.exchanges)

    def exchange(self) -> None:
        """Count an average over ranks, which is rounded with other keys."""
        self.exchanges += 1
        self.count = 0

    def _keys(self, *which: int) -> Keys:
        refuse_capture("a gradient in 8 bits", "use FP8Config(opt_level='O2')")
        keys = stream_keys(*self.counters(), *which)
        return shifted_keys(keys, self.offset) if self.offset else keys

    def copy(self) -> "Rounding":
        """Return a copy that continues independently."""
        twin = Rounding(self.counters, self.offset, self.rank)
        twin.count, twin.exchanges = self.count, self.exchanges
        return twin

    def __reduce__(self) -> Any:
        # The counters come from a live optimizer; a pickled gradient continues without one.
        return Rounding, (tuple, self.offset, self.rank)


def quantize_gradient(x: Tensor, keys: Keys) -> GradientParts:
    """Quantize a gradient into its parts.

    Args:
        x: (R, K) bfloat16 or float32, contiguous.
        keys: the keys of the random bits.
    """
    rows, cols = x.shape
    factor = torch.empty if x.is_cuda and x.numel() else torch.ones
    multiplier = factor((), dtype=torch.float32, device=x.device)
    qdata = torch.empty((rows, cols), dtype=torch.uint8, device=x.device)
    scale = torch.empty((rows, num_groups(cols)), dtype=torch.uint8, device=x.device)
    parts = GradientParts(qdata, scale, multiplier)
    _encode(x, parts, keys, False)
    return parts


def accumulate_gradient(target: GradientParts, x: Tensor, keys: Keys) -> None:
    """Add `x` to a quantized gradient in place; for the arguments see `quantize_gradient`."""
    _encode(x, target, keys, True)
    target.multiplier.fill_(1.0)


def decode_gradient(source: GradientParts, dtype: torch.dtype) -> Tensor:
    """Decode a gradient to (R, K) in a floating-point `dtype`, rounded to nearest."""
    if source.qdata.is_cuda:
        from torch_fp8.kernels.grad_codec import dequantize_gradient

        decoded_dtype = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
        return dequantize_gradient(source, decoded_dtype).to(dtype)
    dense = torch.empty(source.qdata.shape, dtype=dtype, device=source.qdata.device)
    if dense.device.type != "meta":
        for part in row_parts(*dense.shape):
            dense[part] = decode_rows(source, part)
    return dense


def decode_rows(source: GradientParts, part: slice) -> Tensor:
    """Decode some rows to float32."""
    block = BlockScaled(source.qdata[part], source.scale[part])
    if source.qdata.is_cuda:
        return decode_gradient(GradientParts(*block, source.multiplier), torch.float32)
    return decode(block, GRADIENT) * source.multiplier


def zero_gradient(target: GradientParts) -> None:
    """Set a quantized gradient to zero, in place."""
    target.qdata.zero_()
    target.scale.fill_(_SCALE_ONE)
    target.multiplier.fill_(1.0)


def norm(source: GradientParts, ord: float) -> Tensor:
    """Compute the norm of all elements, () float32, of any order but 0, a few rows at a time."""
    rows, cols = source.qdata.shape
    step = max(1, _NORM_ELEMENTS[source.qdata.is_cuda] // cols)
    norms = [
        torch.linalg.vector_norm(decode_rows(source, slice(row, row + step)), ord)
        for row in range(0, rows, step)
    ]
    return torch.linalg.vector_norm(torch.stack(norms), ord)


def has_nonfinite(source: GradientParts) -> Tensor:
    """Return whether an element is Inf or NaN, as () bool; reads only scales and multiplier."""
    if not source.scale.numel():
        return torch.zeros((), dtype=torch.bool, device=source.scale.device)
    largest = source.scale.amax().to(torch.int32)
    factor = torch.where(largest == _SCALE_NAN, torch.nan, (largest << 23).view(torch.float32))
    return ~(factor * GRADIENT.max * source.multiplier).isfinite()


def _encode(x: Tensor, target: GradientParts, keys: Keys, accumulate: bool) -> None:
    if x.is_cuda and x.numel():
        from torch_fp8.kernels.grad_codec import encode_gradient

        encode_gradient(x, target, keys, accumulate)
    elif x.device.type != "meta":
        for part in row_parts(*x.shape):
            value = x[part].float()
            if accumulate:
                value = decode_rows(target, part) + value
            rows, cols = value.shape
            index = element_index(rows, cols, part.start, 0, cols, x.device)
            bits = random_words(index, keys) & 0xFFFF
            target.qdata[part], target.scale[part] = encode(value, GRADIENT, bits << 4 | 8)
