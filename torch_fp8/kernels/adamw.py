"""The optimizer step on CUDA: the twin of `torch_fp8.ops.adamw`, with many matrices per launch.

Matrices are grouped into classes by the properties that are compiled into a kernel: dtypes,
residual and layout (see `kernels.block_layout`). One launch updates a whole class. This module
builds a table of the matrices' addresses and scalars and sends it to the GPU in one asynchronous
copy of 272 bytes per matrix and 4 bytes per chunk.

If a weight has an FP8 payload, the step also writes that (see `kernels.weight_cast`). If the scale
is tensorwise, a second launch per class casts again the weights whose scale has changed.

The result equals `adamw_step_reference` bit for bit, with three exceptions. The last bit can differ
if an element is below 2^-100 of its group's largest (see `kernels.fast_math`). If g^2 overflows,
the weight becomes NaN in this step, in the reference in the next. Codes differ in groups whose
scale is NaN.
"""

import functools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.adamw_kernels import (
    adamw_step_kernel,
    cast_weights_kernel,
    update_rms_kernel,
    update_squares_kernel,
)
from torch_fp8.kernels.arguments import GradientParts, StepScalars, WeightMatrix, WeightPayload
from torch_fp8.kernels.cast_launch import cdiv
from torch_fp8.quantization.block_scaled import num_groups
from torch_fp8.quantization.formats import GROUP_SIZE

CHUNK = 512
# Groups per program, 16384 elements: enough work to hide reading the table (two dependent loads
# from memory), and a billion elements are still 61,000 programs.
SQUARE_CHUNK = 512  # a square of 128 x 128
GROUPS, ODD_GROUPS = 16, 2
# Groups per tile: 16 elements for each thread of the single warp. If elements move one by one, each
# needs an address and a mask in registers, so a thread has 2: with 16 the kernels spill, with 4
# nearly.
REGISTERS = 168
# Registers per thread in squares, or with an amax in "rows" layout: 12 programs then fit in a
# multiprocessor's 65536 registers. Without the limit the compiler uses up to 226. Other variants
# need no more than this, but spill if the limit is set.
PARTIALS = 1024
# Partial sums added at once; a matrix of 16 million elements has this many.

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.uint8: tl.uint8}
_MASK32 = (1 << 32) - 1
_LARGEST_SIDE = (1 << 31) // 128 - 1  # of a weight with payload: int32 positions in a square

Entry = tuple[WeightMatrix, StepScalars]


class _Class(NamedTuple):
    """The properties of a matrix that are compiled into a kernel."""

    weight: torch.dtype
    residual: bool
    grad: torch.dtype
    layout: str
    amax: bool
    payload: str
    power_of_two: bool

    @property
    def chunk(self) -> int:
        return SQUARE_CHUNK if self.layout == "squares" else CHUNK

    @property
    def registers(self) -> int | None:
        limited = self.layout == "squares" or (self.amax and self.layout == "rows")
        return REGISTERS if limited else None

    @property
    def constants(self) -> dict[str, object]:
        return {
            "WEIGHT": _DTYPES[self.weight],
            "RESIDUAL": self.residual,
            "GRAD": _DTYPES[self.grad],
            "LAYOUT": self.layout,
            "CHUNK": self.chunk,
            "GROUPS": ODD_GROUPS if self.layout == "any" else GROUPS,
        }


def adamw_step(
    entries: Sequence[Entry], lr_multipliers: Sequence[Tensor | None] | None = None
) -> None:
    """Step every matrix in place, with the results of `adamw_step_reference` on each.

    Args:
        entries: matrices on one CUDA device, each with the scalars of its step.
        lr_multipliers: a factor of the learning rate for each entry, () float32 on the same device,
            or None; as in the reference.
    """
    multipliers = lr_multipliers or [None] * len(entries)
    for kind, chosen in _classes(entries).items():
        table, chunks, num_chunks = _tables(
            [entries[i] for i in chosen], kind, lr_multipliers=[multipliers[i] for i in chosen]
        )
        with torch.cuda.device_of(table):
            adamw_step_kernel[(num_chunks,)](
                table,
                chunks,
                AMAX=kind.amax,
                **kind.constants,
                num_warps=1,
                enable_fp_fusion=False,
                maxnreg=kind.registers,
            )
            if kind.payload:
                cast_weights_kernel[(num_chunks,)](
                    table,
                    chunks,
                    WEIGHT=_DTYPES[kind.weight],
                    SQUARES=kind.payload == "block_128x128",
                    POWER_OF_TWO=kind.power_of_two,
                    GROUPS=GROUPS,
                    num_warps=1,
                    enable_fp_fusion=True,
                )


def writes_payload(matrix: WeightMatrix, payload: WeightPayload) -> bool:
    """Return whether the step can write a payload, in 128 x 128 squares and 16-byte accesses."""
    return (
        _class_of(matrix).layout == "flat"
        and payload.qdata.data_ptr() % 16 == 0
        and max(matrix.weight.shape) <= _LARGEST_SIDE
        and (matrix.amax is not None or payload.granularity == "block_128x128")
    )


def update_rms(entries: Sequence[Entry]) -> Tensor:
    """Compute `update_rms_reference` of every matrix, (len(entries),) float32.

    The order of the sums is fixed, so results repeat bit for bit.
    """
    if not entries:
        return torch.zeros(0, device="cpu", dtype=torch.float32)
    entries = [(matrix._replace(amax=None, payload=None), scalars) for matrix, scalars in entries]
    result = torch.zeros(len(entries), device=entries[0][0].weight.device, dtype=torch.float32)
    classes: dict[tuple[_Class, bool], list[int]] = {}
    for kind, chosen in _classes(entries).items():
        without_weight = kind._replace(weight=torch.bfloat16, residual=False)
        for i in chosen:
            coupled = bool(entries[i][1].weight_decay)
            classes.setdefault((kind if coupled else without_weight, coupled), []).append(i)
    for (kind, coupled), chosen in classes.items():
        table, chunks, num_chunks = _tables(
            [entries[i] for i in chosen], kind, update_rms=[result[i] for i in chosen]
        )
        partial = result.new_empty(num_chunks)
        with torch.cuda.device_of(table):
            update_squares_kernel[(num_chunks,)](
                table,
                chunks,
                partial,
                COUPLED=coupled,
                **kind.constants,
                num_warps=1,
                enable_fp_fusion=False,
            )
            update_rms_kernel[(len(chosen),)](
                table,
                partial,
                CHUNK=CHUNK,
                BLOCK_SIZE=PARTIALS,
                num_warps=4,
                enable_fp_fusion=True,
            )
    return result


def _classes(entries: Sequence[Entry]) -> dict[_Class, list[int]]:
    """Map each class to the indices of its entries; empty matrices belong to no class."""
    classes: dict[_Class, list[int]] = {}
    for i, (matrix, _) in enumerate(entries):
        if matrix.weight.numel():
            classes.setdefault(_class_of(matrix), []).append(i)
    return classes


def _class_of(matrix: WeightMatrix) -> _Class:
    grad = matrix.grad.qdata if isinstance(matrix.grad, GradientParts) else matrix.grad
    tensors = [matrix.weight, grad, matrix.exp_avg.qdata, matrix.exp_avg_sq.qdata]
    if matrix.residual is not None:
        tensors.append(matrix.residual)
    addresses = 0
    for tensor in tensors:
        assert tensor.is_contiguous()
        addresses |= tensor.data_ptr()
    return _class_for(
        matrix.weight.dtype,
        matrix.residual is not None,
        grad.dtype,
        matrix.weight.shape[1],
        matrix.row_length,
        addresses % 16 == 0,
        matrix.amax is not None,
        None if matrix.payload is None else matrix.payload[:2],
    )


@functools.cache
def _class_for(
    weight: torch.dtype,
    residual: bool,
    grad: torch.dtype,
    cols: int,
    row_length: int,
    aligned: bool,
    amax: bool,
    payload: tuple[str, bool] | None,
) -> _Class:
    layout = "any"
    if cols % 16 == 0 and aligned:
        layout = "flat" if row_length == cols and cols % GROUP_SIZE == 0 else "rows"
    if payload is None:
        return _Class(weight, residual, grad, layout, amax, "", False)
    assert layout == "flat"
    return _Class(weight, residual, grad, "squares", amax, *payload)


def _tables(
    entries: list[Entry],
    kind: _Class,
    lr_multipliers: list[Tensor | None] | None = None,
    update_rms: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Build, on the device, a record per matrix and the matrix index of each program.

    Returns:
        records (M, fields of Record) int64, matrix indices (P or P + 1,) int32, and the number of
        programs P.
    """
    none = [None] * len(entries)
    places: list[int] = []
    numbers: list[float] = []
    counts, first = [], 0
    for (matrix, scalars), multiplier, rms in zip(
        entries, lr_multipliers or none, update_rms or none, strict=True
    ):
        rows, cols = matrix.weight.shape
        groups = rows * num_groups(cols)
        if kind.layout == "squares":
            groups = cdiv(rows, 128) * cdiv(cols, 128) * SQUARE_CHUNK
        places += _addresses(matrix, multiplier, rms)
        row, col, row_length = matrix[5:8]
        start = row * row_length + col
        at = first, groups, rows, cols, row_length & _MASK32, start & _MASK32
        places += (*at, *scalars.keys)
        # A `Record`'s numbers, in its order.
        numbers += (-1.0 if scalars.maximize else 1.0, *scalars[:8])
        counts.append(cdiv(groups, kind.chunk))
        first += counts[-1]
    # Arrays, because torch.tensor inspects each number of a list in turn.
    integers = torch.frombuffer(array("q", places), dtype=torch.int64).view(len(entries), -1)
    bits = torch.frombuffer(array("f", numbers), dtype=torch.int32).view(len(entries), -1)
    records = torch.cat([integers, bits.long()], dim=1)
    device = entries[0][0].weight.device
    # Pinned: a copy from pageable memory would wait for the kernels before it.
    host = torch.empty(
        records.numel() + cdiv(first, 2),
        dtype=torch.int64,
        device="cpu",
        pin_memory=device.type == "cuda",
    )
    host[: records.numel()] = records.view(-1)
    owners = torch.arange(len(entries), dtype=torch.int32, device="cpu")
    chunks = host[records.numel() :].view(torch.int32)
    chunks[:first] = owners.repeat_interleave(
        torch.tensor(counts, device="cpu", dtype=torch.int64), output_size=first
    )
    buffer = host.to(device, non_blocking=True)
    chunks = buffer[records.numel() :].view(torch.int32)
    return buffer[: records.numel()].view(len(entries), -1), chunks, first


def _addresses(
    matrix: WeightMatrix, lr_multiplier: Tensor | None, update_rms: Tensor | None
) -> list[int]:
    """Return the addresses of a `Record`, in its order; 0 for what there is not."""
    weight, residual, grad, first, second, _, _, _, amax, payload = matrix
    parts = grad if isinstance(grad, GradientParts) else (grad, None, None)
    casts = (None, None) if payload is None else payload[2:]
    tensors = (weight, residual, *parts, *first, *second, lr_multiplier, update_rms, amax, *casts)
    return [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, None)]
