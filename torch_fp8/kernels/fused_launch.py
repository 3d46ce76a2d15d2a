"""What the launchers of fused producers share: outputs, and stand-ins for absent tensors.

Legend: R rows, C columns of the result; rowwise is it quantized along C, columnwise its transpose
quantized along R.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions, DelayedCastOptions
from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.quantize import BLOCK, cast_flags, quantize_2d
from torch_fp8.kernels.quantize_delayed import advance_history
from torch_fp8.quantization.payload_shape import (
    COL_ALIGNMENT,
    Layouts,
    multiple_of_16,
    new_group_scales,
    padded_rows,
)

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
GROUPS = {"block_1x128": 128, "block_1x32": 32}


class Past(NamedTuple):
    """The history of a delayed scale; see `torch_fp8.kernels.arguments.DelayedCastOptions`."""

    amaxes: Tensor
    progress: Tensor
    algorithm: str
    margin: int

    def scale(self, amax: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scale, () float32, where the amax () of the result is already known."""
        return advance_history(
            self.amaxes, None, amax, dtype, self.algorithm, self.margin, record=False
        )


class Cast(NamedTuple):
    """How a result is cast: the fields of `torch_fp8.kernels.arguments.CastOptions`, and the past.

    `past`: None, or where the scale comes from instead; of several results, the first one's.
    """

    dtype: torch.dtype
    granularity: str
    power_of_two: bool
    rowwise: bool
    columnwise: bool
    scale: Tensor | None = None
    amax: Tensor | None = None
    past: Past | None = None

    @classmethod
    def delayed(cls, options: DelayedCastOptions) -> "Cast":
        """Build the cast that is told to a delayed operator."""
        amaxes, progress, dtype, algorithm, margin, *layouts = options
        past = Past(amaxes, progress, algorithm, margin)
        return cls(dtype, "tensorwise", False, *layouts, past=past)

    @property
    def options(self) -> CastOptions:
        """The cast of a result whose scale does not come from the past."""
        return CastOptions(*self[:-1])

    def known(self, amax: Tensor) -> "Cast":
        """Turn a delayed cast of a result whose amax () is known into one with a given scale."""
        assert self.past is not None
        return self._replace(scale=self.past.scale(amax, self.dtype), past=None)

    def is_fused(self, *inputs: Tensor) -> bool:
        """Return whether one launch computes the result and casts it in tiles.

        A rowwise scale belongs to more than a tile. Columns that are no multiple of 16 are moved
        one element at a time, each with an address and a mask in registers, and FP8 GEMMs do not
        take them: these are computed first and cast then. Rows may be any number, but where the
        column layout has squares and no padding.
        """
        given = [how for how in (self.amax, self.scale, self.past) if how is not None]
        assert len(given) == (self.granularity == "tensorwise")
        rows, cols = inputs[0].shape
        unpadded = self.columnwise and COL_ALIGNMENT[self.granularity] == 1
        odd = cols % 16 or (unpadded and rows % 16) or any(x.stride(1) != 1 for x in inputs)
        return self.granularity != "rowwise" and not odd and inputs[0].numel() > 0

    def source(self, unused: Tensor) -> Tensor:
        """Return the tensor from which `epilogue.store_cast` reads the scale."""
        if self.amax is not None:
            return self.amax.view(torch.int32)
        return unused if self.scale is None else self.scale

    def history(self, unused: Tensor) -> tuple[Tensor, Tensor, int, float]:
        """Return amaxes, progress, length and headroom as a kernel takes them."""
        if self.past is None:
            return unused, unused, 0, 1.0
        past = self.past
        return past.amaxes, past.progress, past.amaxes.shape[0], 2.0**past.margin

    def flags(self) -> dict[str, object]:
        """Return the compile-time arguments of a kernel that casts."""
        if self.past is not None:
            source = "recent" if self.past.algorithm == "most_recent" else "history"
        elif self.granularity == "tensorwise":
            source = "given" if self.amax is None else "amax"
        else:
            source = "square" if self.granularity == "block_128x128" else "groups"
        return {
            "SCALE": source,
            "GROUP": GROUPS.get(self.granularity, BLOCK),
            **cast_flags(self.options),
        }

    def unfused(self, y: Tensor) -> Layouts:
        """Cast a result that has already been written to memory."""
        q, s, qt, st = quantize_2d(y, self.options)
        if self.granularity == "tensorwise":  # no output may be an input, nor come twice
            s, st = (None if self.amax is None else s if st is None else st), None
        return present(q, s, qt, st, y, self.dtype)

    def outputs(self, x: Tensor, cols: int | None = None) -> Layouts:
        """Allocate the layouts of a result with x's rows; empty tensors for layouts not asked for.

        Args:
            x: (R, C).
            cols: the columns of the result; None: C.
        """
        rows, cols = x.shape[0], x.shape[1] if cols is None else cols
        s = self._scales(x, rows, cols) if self.rowwise else None
        st = self._scales(x, cols, rows) if self.columnwise else None
        if self.amax is not None or self.past is not None:
            s = x.new_empty((), dtype=torch.float32)
        return present(
            self._row_payload(x, rows, cols) if self.rowwise else None,
            s,
            x.new_empty((cols, padded_rows(rows, self.granularity)), dtype=self.dtype)
            if self.columnwise
            else None,
            st,
            x,
            self.dtype,
        )

    def _row_payload(self, x: Tensor, rows: int, cols: int) -> Tensor:
        if self.granularity != "block_1x128" or rows % 16 == 0:
            return x.new_empty((rows, cols), dtype=self.dtype)
        # A GEMM takes the rows of such a payload in multiples of 16: see `gemm_operand`.
        return x.new_empty((multiple_of_16(rows), cols), dtype=self.dtype)[:rows]

    def _scales(self, x: Tensor, rows: int, cols: int) -> Tensor | None:
        if self.granularity == "tensorwise":
            return None
        if self.granularity == "block_128x128":
            shape = (cdiv(rows, BLOCK), cdiv(cols, BLOCK))
            return x.new_empty(shape, dtype=torch.float32)
        return new_group_scales(x, rows, cols, GROUPS[self.granularity])


def saved_outputs(x: Tensor, wanted: bool = True) -> tuple[Tensor, Tensor]:
    """Allocate x as it is saved for backward; empty tensors if it is not saved."""
    if not wanted:
        return x.new_empty(0, dtype=torch.float8_e4m3fn), x.new_empty((0,), dtype=torch.float32)
    rows, cols = x.shape
    return x.new_empty((rows, cols), dtype=torch.float8_e4m3fn), new_group_scales(x, rows, cols)


def save_unfused(x: Tensor, wanted: bool = True) -> tuple[Tensor, Tensor]:
    """Save x for backward in a launch of its own."""
    if not wanted:
        return saved_outputs(x, False)
    q, s, *_ = quantize_2d(x, CastOptions(torch.float8_e4m3fn, "block_1x128", True, True, False))
    assert q is not None
    assert s is not None
    return q, s


def present(
    q: Tensor | None,
    s: Tensor | None,
    qt: Tensor | None,
    st: Tensor | None,
    x: Tensor,
    dtype: torch.dtype,
) -> Layouts:
    """Replace each None by the empty tensor that an operator returns for it."""
    return (
        x.new_empty(0, dtype=dtype) if q is None else q,
        x.new_empty(0, dtype=torch.float32) if s is None else s,
        x.new_empty(0, dtype=dtype) if qt is None else qt,
        x.new_empty(0, dtype=torch.float32) if st is None else st,
    )


def registers(warps: int) -> int:
    """Return the registers of a thread when one program at a time occupies a multiprocessor.

    For kernels that end as `history_tiles` says: left to itself, the assembler takes half as many
    for most of them, so that two programs fit, and spills a few bytes.
    """
    return min(65536 // (32 * warps), 255)


def payload(qdata: Tensor) -> Tensor:
    """View an FP8 tensor as the bytes that a kernel takes."""
    return qdata.view(torch.uint8)


def amax_bits(x: Tensor, *shape: int) -> Tensor:
    """Allocate the bits of amaxes, initialised to 0, for kernels to raise."""
    return x.new_zeros(shape, dtype=torch.int32)
