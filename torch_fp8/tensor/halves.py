"""`Halves`: memory of a float32 weight, a BF16 tensor and the bits below it."""

import itertools
import warnings
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from torch_fp8.quantization.block_scaled import matrix_shape, row_parts
from torch_fp8.quantization.split_float import (
    join,
    pack,
    saturated,
    split,
    stored_cols,
    unpack,
)
from torch_fp8.quantization.stochastic_rounding import element_index, random_words

EXACT_BITS = 16
"""The residual bits with which a split is exact."""
VERSIONS = itertools.count(1)
"""Numbers of which each value of a weight has one of its own."""


class Halves:
    """Memory of a float32 weight; all aliases share it.

    Attributes:
        high: bfloat16, of the weight's shape, contiguous.
        residual: residual as stored (`torch_fp8.quantization.split_float.pack`); None without bits.
        bits: residual bits that are stored now.
        step_bits: residual bits that a step of the optimizer leaves.
        version: another number after each write, whoever wrote, and that of no other weight.
    """

    __slots__ = (
        "__weakref__",
        "awaited",
        "bits",
        "copy",
        "high",
        "residual",
        "step_bits",
        "version",
    )

    def __init__(
        self, high: Tensor, residual: Tensor | None, bits: int, step_bits: int | None = None
    ) -> None:
        self.high, self.residual, self.bits = high, residual, bits
        self.step_bits = bits if step_bits is None else step_bits
        self.version = next(VERSIONS)
        self.awaited: Tensor | None = None
        self.copy: tuple[int, weakref.ref[Tensor]] | None = None

    @staticmethod
    @torch.no_grad()
    def of(weight: Tensor, bits: int) -> "Halves":
        """Split a plain float32 tensor, rounded to nearest."""
        return Halves(*split_matrix(weight, bits), bits)

    def join(self, device: torch.device | None = None) -> Tensor:
        """Return the float32 weight, on `device` if one is given."""
        exact = self.bits == EXACT_BITS
        return join_matrix(self.high, self.residual, self.bits, device, exact)

    def write(self, weight: Tensor) -> None:
        """Take the float32 weight exactly."""
        high, residual = split_matrix(weight, EXACT_BITS)
        self.high.copy_(high)
        if self.bits == EXACT_BITS and self.residual is not None:
            self.residual.copy_(residual)  # others may share it
        else:
            self.bits, self.residual = EXACT_BITS, residual
        self.version = next(VERSIONS)

    def settle(self, keys: tuple[int, int], origin: tuple[int, int, int] | None = None) -> None:
        """Round what somebody has written to the bits of a step, stochastically.

        Args:
            keys: name the random bits, see `torch_fp8.quantization.stochastic_rounding`.
            origin: row and column of the whole matrix where this shard starts, and its columns;
                None: it is no shard.
        """
        if self.bits == self.step_bits:
            return
        if self.bits < self.step_bits:
            self.write(self.join())
        if self.high.device.type == "cpu" and self.high.is_shared():
            warnings.warn(
                "FP8: an optimizer step stores the lower half of a weight outside the memory "
                "shared by processes; use FP8Config(split_weights=False) if processes share "
                "weights",
                stacklevel=2,
            )
        rows, cols = _matrix_shape(self.high)
        row, col, row_length = origin or (0, 0, cols)
        residual = empty_residual(self.high, self.step_bits)
        matrix = self.high.view(rows, cols)  # (R, C) bfloat16
        for part in row_parts(rows, cols) if self.high.numel() else ():
            assert self.residual is not None
            wide = unpack(self.residual[part], self.bits, cols)  # (r, C) int32
            joined = join(matrix[part], wide, self.bits, self.bits == EXACT_BITS)
            joined = saturated(joined, self.step_bits)
            index = element_index(
                len(joined), cols, row + part.start, col, row_length, joined.device
            )
            upper, lower = split(joined, self.step_bits, random_words(index, keys))
            matrix[part] = upper
            if residual is not None:
                assert lower is not None
                residual[part] = pack(lower, self.step_bits)
        self.residual, self.bits = residual, self.step_bits

    def adopt(self, residual: Tensor) -> bool:
        """Take the residual of a file that has these weights as BF16; return whether they are.

        Until the next step it is taken again when the weight is loaded in BF16: the file of the
        model may be read after that of the optimizer.

        Args:
            residual: as stored with `step_bits`.
        """
        self.awaited = residual.to(self.high.device)
        return self.take_awaited()

    def take_awaited(self) -> bool:
        """Take the residual that waits for this weight, if the weight is BF16 and one does."""
        if self.awaited is None or (self.residual is not None and bool(self.residual.any())):
            return False
        self.residual, self.bits = self.awaited.clone(), self.step_bits
        self.version = next(VERSIONS)
        return True

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Halves":
        """Return a weight of what `function` makes of each half."""
        residual = None if self.residual is None else function(self.residual)
        return Halves(function(self.high), residual, self.bits, self.step_bits)

    @property
    def tensors(self) -> list[Tensor]:
        """Return what is stored."""
        return [self.high] if self.residual is None else [self.high, self.residual]


def _matrix_shape(x: Tensor) -> tuple[int, int]:
    return matrix_shape(x.shape) if x.ndim > 1 else (1, x.numel())


def empty_residual(high: Tensor, bits: int) -> Tensor | None:
    """Return memory for the residual of a weight; None without bits."""
    if not bits or not high.numel():
        return None
    rows, cols = _matrix_shape(high)
    dtype = torch.int16 if bits == EXACT_BITS else torch.int8
    return torch.empty((rows, stored_cols(cols, bits)), dtype=dtype, device=high.device)


def split_matrix(weight: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Split a float32 tensor into BF16 of the same shape, contiguous, and its residual as stored.

    Rounding is to nearest, part by part, so that no temporary has the tensor's size. Numbers above
    the largest that the halves hold become that.
    """
    rows, cols = _matrix_shape(weight)
    high = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    stored = empty_residual(high, bits)
    source, target = weight.contiguous().view(rows, cols), high.view(rows, cols)
    parts = row_parts(rows, cols) if weight.numel() and weight.device.type != "meta" else ()
    for part in parts:
        rows_of_part = source[part] if bits == EXACT_BITS else saturated(source[part], bits)
        upper, residual = split(rows_of_part, bits)
        target[part] = upper
        if stored is not None:
            assert residual is not None
            stored[part] = pack(residual, bits)
    return high, stored


def join_matrix(
    high: Tensor,
    residual: Tensor | None,
    bits: int,
    device: torch.device | None = None,
    exact: bool = False,
) -> Tensor:
    """Join `split_matrix`'s parts to the float32 tensor, contiguous.

    Args:
        high, residual, bits: halves of the tensor.
        device: device of the result; None: that of the halves.
        exact: whether the residual is certainly of this weight.
    """
    device = device or high.device
    joined = high.new_empty(high.shape, dtype=torch.float32, device=device)
    if not high.numel() or device.type == "meta":
        return joined
    rows, cols = _matrix_shape(high)
    matrix, target = high.contiguous().view(rows, cols), joined.view(rows, cols)
    for part in row_parts(rows, cols):
        lower = None if residual is None else unpack(residual[part].to(high.device), bits, cols)
        target[part] = join(matrix[part], lower, bits if lower is not None else 0, exact)
    return joined
