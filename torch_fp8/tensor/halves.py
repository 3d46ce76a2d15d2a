"""`Halves`: storage of a float32 weight as a BF16 tensor and the bits below it.

`PayloadCast` is the cast of the payload that such a weight keeps from step to step.
"""

import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.ops.quantize import QuantizedTensor, as_layouts, quantize_layouts, quantize_stacked
from torch_fp8.quantization.block_scaled import matrix_shape, row_parts
from torch_fp8.quantization.payload_shape import SQUARE
from torch_fp8.quantization.recipe import CastSpec
from torch_fp8.quantization.scaling import tensor_amax
from torch_fp8.quantization.split_float import (
    EXACT_BITS,
    RESIDUAL_BITS,
    join,
    residual_dtype,
    saturated,
    split,
)
from torch_fp8.quantization.stochastic_rounding import element_index, random_words
from torch_fp8.tensor.base import in_shared_memory
from torch_fp8.tensor.scale_table import ScaleTable

VERSIONS = itertools.count(1)
"""Counter of unique numbers, one for each value that any weight has had."""


class PayloadCast(NamedTuple):
    """A cast of a stored weight (R, C), or of the weights (E, R, C) of E experts, in one layout.

    Attributes:
        spec: format and granularity.
        flip: whether the payload is that of the transpose (C, R), quantized along R.
    """

    spec: CastSpec
    flip: bool = False

    @staticmethod
    def of(spec: CastSpec, transposed: bool) -> "PayloadCast":
        """Return the cast for a layer whose weight is stored as (N, K), or `transposed` as (K, N).

        Square blocks are cast as they are stored, because both layouts have the same scales. Other
        payloads serve only forward, which reads (N, K), quantized along K.
        """
        return PayloadCast(spec, transposed and spec.granularity not in SQUARE)

    @property
    def needs_amax(self) -> bool:
        """Whether the scale comes from the weight's amax, which takes a separate read.

        It does with delayed scaling, too: the optimizer knows the amax of the weight it writes.
        """
        return self.spec.granularity == "tensorwise"

    @property
    def serves_backward(self) -> bool:
        """Whether backward reads the same bytes, transposed."""
        return self.spec.granularity in SQUARE

    def num_bytes(self, halves: "Halves") -> int:
        """Return the bytes of the payload and its scales."""
        payload = self.empty(halves.high.to("meta"))
        return payload.qdata.nbytes + payload.scale.nbytes

    def __call__(self, halves: "Halves") -> QuantizedTensor:
        """Cast the BF16 half, with the amax that the halves keep."""
        if halves.high.ndim == 3:
            return quantize_stacked(halves.high.mT if self.flip else halves.high, self.spec)
        options = self._options(halves.current_amax() if self.needs_amax else None)
        return self._layout(quantize_layouts(halves.high, options))

    def empty(self, high: Tensor) -> QuantizedTensor:
        """Allocate the payload of a BF16 half."""
        if high.ndim == 3:
            experts, rows, cols = high.mT.shape if self.flip else high.shape
            qdata = high.new_empty((experts, rows, cols), dtype=self.spec.format.dtype)
            scale = high.new_empty((experts, rows, 1), dtype=torch.float32)
            return QuantizedTensor(qdata, scale, self.spec.granularity)
        options = self._options(None)
        return self._layout(as_layouts(options.new_layouts(high), options))

    def _layout(self, layouts: Any) -> QuantizedTensor:
        return layouts[self.flip]

    def _options(self, amax: Tensor | None) -> CastOptions:
        layout = {"rowwise": not self.flip, "columnwise": self.flip}
        return CastOptions.of(self.spec, None, amax, **layout)


class Halves:
    """Storage of a float32 weight, shared by all its aliases.

    Attributes:
        high, residual: bfloat16, of the weight's shape, contiguous; and int8 or int16, (R, C), or
            None for an empty weight.
        bits: number of residual bits now: 16 if other code than the step has written, else 8.
        version: unique number, renewed by each write.
        amax: () float32, the largest magnitude of `high` when `measured` was the version, or None
            if no cast needs it. The optimizer's step raises it in place. See `current_amax`.
        cast, payload: a cast of `high`, and its result when `filled` was the version, which the
            optimizer's step renews in place, or None if it is not kept. Read it by
            `current_payload`.
        table, row: scales of a block's payloads, and the index of this one's, or None.
        codes: the payload's codes in a graph, whose scale `split_weight.read_scale` adds, or None.
        matrix: the kernel's arguments in the optimizer's step that set `stepped`, or None. They
            hold while `stepped` equals `version` and the tensors are the same.
    """

    def __init__(
        self,
        high: Tensor,
        residual: Tensor | None,
        bits: int,
        amax: Tensor | None = None,
        cast: PayloadCast | None = None,
        payload: QuantizedTensor | None = None,
    ) -> None:
        self.high, self.residual, self.bits, self.amax = high, residual, bits, amax
        self.cast, self.payload = cast, payload
        self.version = self.measured = self.filled = self.stepped = next(VERSIONS)
        self.table: ScaleTable | None = None
        self.row: int | None = None
        self.codes: Tensor | None = None
        self.copy: tuple[int, weakref.ref[Tensor]] | None = None
        self.matrix: Any = None

    @staticmethod
    @torch.no_grad()
    def of(weight: Tensor, bits: int) -> "Halves":
        """Split a plain float32 tensor, rounding to nearest."""
        return Halves(*split_matrix(weight, bits), bits)

    def join(self, device: torch.device | None = None) -> Tensor:
        """Return the float32 weight, on `device` if one is given."""
        return join_matrix(self.high, self.residual, self.bits, device, self.bits == EXACT_BITS)

    def keep_amax(self) -> None:
        """Keep the amax from step to step, for casts with one scale."""
        with torch.inference_mode(False):
            self.amax = torch.zeros((), dtype=torch.float32, device=self.high.device)
        self.measured = self.stepped = 0

    def current_amax(self) -> Tensor | None:
        """Return the amax, always in the memory that graphs read, or None if it is not kept."""
        amax = self.amax
        if amax is not None and not self.is_measured:
            amax.copy_(tensor_amax(self.high))
            self.measured = self.version
        return amax

    @property
    def is_measured(self) -> bool:
        """Whether the amax is that of the current weight."""
        return self.measured == self.version and not in_shared_memory(self.high)

    def keep_payload(self, cast: PayloadCast | None) -> None:
        """Keep the result of a cast from step to step, or nothing if `cast` is None."""
        if cast != self.cast:
            with torch.inference_mode(False):
                self.payload = None if cast is None else cast.empty(self.high)
            self.cast, self.filled, self.stepped = cast, 0, 0
            self.table = self.row = None

    def current_payload(self, cast: PayloadCast | None) -> QuantizedTensor | None:
        """Return the payload, always in the same memory, which graphs read.

        Args:
            cast: cast that the caller needs.
        Returns:
            The payload, or None unless the result of this cast is kept.
        """
        if self.payload is None or cast != self.cast:
            return None
        if not self.is_filled:
            assert cast is not None
            # `.data` keeps the version: a backward may have saved both tensors, and they match.
            for old, new in zip(self.payload[:2], cast(self)[:2], strict=True):
                old.data.copy_(new)
            self.filled = self.version
        return self.payload

    @property
    def is_filled(self) -> bool:
        """Whether the payload is a cast of the current weight."""
        return self.filled == self.version and not in_shared_memory(self.high)

    @property
    def graph_amax(self) -> Any:
        """`current_amax`; Dynamo does not trace how it is renewed."""
        return self.amax if self.is_measured else _renewed(self.current_amax)

    @property
    def graph_codes(self) -> Tensor:
        """The codes of `current_payload` for the kept cast, renewed as in `graph_amax`."""
        if self.codes is not None:
            return self.codes
        renewed: Any = self.payload if self.is_filled else _renewed(self.current_payload, self.cast)
        return renewed.qdata

    def keep_like(self, old: "Halves") -> None:
        """Keep an amax and a payload if the halves that these replace did."""
        if old.amax is not None and self.amax is None:
            self.keep_amax()
        if old.cast is not None and self.cast is None:
            self.keep_payload(old.cast)
            if old.table is not None and self.high.device != old.high.device:
                old.table.keep(self, old.row)  # moved; a copy on the same device gets no row

    def write(self, weight: Tensor) -> None:
        """Store a float32 weight exactly, with 16 residual bits."""
        high, residual = split_matrix(weight, EXACT_BITS)
        self.high.copy_(high)
        if self.bits == EXACT_BITS and self.residual is not None:
            self.residual.copy_(residual)  # in place: other processes may share it
        else:
            self.bits, self.residual = EXACT_BITS, residual
        self.version = next(VERSIONS)

    def settle(self, keys: tuple[int, int], origin: tuple[int, int, int] | None = None) -> None:
        """Round a weight that other code has written to 8 residual bits, stochastically.

        Args:
            keys: keys of the random bits, see `torch_fp8.quantization.stochastic_rounding`.
            origin: row and column at which this shard starts in the whole matrix, and the number of
                columns of the whole, or None if not a shard.
        """
        if self.bits == RESIDUAL_BITS:
            return
        if self.high.device.type == "cpu" and self.high.is_shared():
            warnings.warn(
                "FP8: an optimizer step stores the lower half of a weight outside the memory "
                "shared by processes; use FP8Config(split_weights=False) if processes share "
                "weights",
                stacklevel=2,
            )
        rows, cols = _matrix_shape(self.high)
        row, col, row_length = origin or (0, 0, cols)
        old: Any = self.residual
        residual: Any = empty_residual(self.high, RESIDUAL_BITS)
        matrix = self.high.view(rows, cols)  # (R, C) bfloat16
        for part in row_parts(rows, cols):
            joined = join(matrix[part], old[part], self.bits, exact=True)
            joined = saturated(joined, RESIDUAL_BITS)
            index = element_index(
                len(joined), cols, row + part.start, col, row_length, joined.device
            )
            matrix[part], residual[part] = split(joined, RESIDUAL_BITS, random_words(index, keys))
        self.residual, self.bits = residual, RESIDUAL_BITS

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Halves":
        """Return new halves, with `function` applied to each."""
        residual = None if self.residual is None else function(self.residual)
        halves = Halves(function(self.high), residual, self.bits)
        halves.keep_like(self)
        return halves

    @staticmethod
    def unflattened(inner: dict[str, Tensor], context: Any) -> "Halves":
        """Return the halves that `SplitWeight.__tensor_flatten__` took apart."""
        (bits, cast, row), codes = context, inner.get("fp8_payload")
        halves = Halves(inner["high"], inner.get("residual"), bits, inner.get("fp8_amax"), cast)
        halves.row, halves.codes = row, codes
        if codes is not None and row is None:
            halves.payload = QuantizedTensor(codes, inner["fp8_scale"], cast.spec.granularity)
        return halves

    @property
    def kept(self) -> list[Tensor]:
        """The tensors derived from `high`: its amax, its payload and the payload's scale."""
        return [x for x in (self.amax, *(self.payload or ())[:2]) if x is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """The stored tensors: the BF16 half, and the residual if there is one."""
        return [self.high] if self.residual is None else [self.high, self.residual]


@torch.compiler.disable
def _renewed(compute: Callable[..., Any], *arguments: Any) -> Any:
    return compute(*arguments)


def _matrix_shape(x: Tensor) -> tuple[int, int]:
    return matrix_shape(x.shape) if x.ndim > 1 else (1, x.numel())


def empty_residual(high: Tensor, bits: int) -> Tensor | None:
    """Allocate the residual of a weight, of 8 or 16 bits, or None for an empty weight."""
    if not high.numel():
        return None
    return torch.empty(_matrix_shape(high), dtype=residual_dtype(bits), device=high.device)


def split_matrix(weight: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Split a float32 tensor into contiguous BF16 of the same shape, and the residual.

    It rounds to nearest, a few rows at a time, so that no temporary has the tensor's size. Finite
    numbers beyond the largest that the halves hold saturate.
    """
    rows, cols = _matrix_shape(weight)
    high = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    stored: Any = empty_residual(high, bits)
    source, target = weight.contiguous().view(rows, cols), high.view(rows, cols)
    for part in row_parts(rows, cols) if weight.device.type != "meta" else ():
        rows_of_part = source[part] if bits == EXACT_BITS else saturated(source[part], bits)
        target[part], stored[part] = split(rows_of_part, bits)
    return high, stored


def join_matrix(
    high: Tensor,
    residual: Tensor | None,
    bits: int,
    device: torch.device | None = None,
    exact: bool = False,
) -> Tensor:
    """Join the results of `split_matrix` to a contiguous float32 tensor.

    Args:
        high, residual, bits: BF16 half, residual and its number of bits.
        device: device of the result, or None for that of the halves.
        exact: whether the residual certainly belongs to this weight, see `split_float.join`.
    """
    device = device or high.device
    joined = high.new_empty(high.shape, dtype=torch.float32, device=device)
    if not high.numel() or device.type == "meta":
        return joined
    rows, cols = _matrix_shape(high)
    matrix, target = high.contiguous().view(rows, cols), joined.view(rows, cols)
    for part in row_parts(rows, cols):
        lower = None if residual is None else residual[part].to(high.device)
        target[part] = join(matrix[part], lower, bits if lower is not None else 0, exact)
    return joined
