"""The optimizer step on CUDA: the twin of `torch_fp8.ops.adamw`, with many matrices per launch.

Matrices are grouped into classes by the properties that are compiled into a kernel: dtypes,
residual and layout (see `kernels.block_scaled`). One launch updates a whole class. This module
builds a table of the matrices' addresses and scalars and sends it to the GPU in one asynchronous
copy of 272 bytes per matrix and 4 bytes per chunk.

If a weight has an FP8 payload, the step also writes that (see `cast_weights_kernel`). If the scale
is tensorwise, a second launch per class casts again the weights whose scale has changed.

The result equals `adamw_step_reference` bit for bit, with three exceptions. The last bit can differ
if an element is below 2^-100 of its group's largest (see `kernels.fast_math`). If g^2 overflows,
the weight becomes NaN in this step, in the reference in the next. Codes differ in groups whose
scale is NaN.
"""

import functools
import itertools
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.adamw_kernels import (
    Record,
    adamw_step_kernel,
    cast_weights_kernel,
    update_rms_kernel,
    update_squares_kernel,
)
from torch_fp8.kernels.arguments import GradientParts, StepScalars, WeightMatrix, WeightPayload
from torch_fp8.kernels.cast_launch import cdiv
from torch_fp8.quantization.block_scaled import num_groups
from torch_fp8.quantization.formats import GROUP_SIZE
from torch_fp8.quantization.stochastic_rounding import stream_states

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

_AT = {name: i for i, name in enumerate(Record._fields)}
_HALF = torch.int32  # of a field

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
    def options(self) -> dict[str, object]:
        """The compile-time constants and options of a launch."""
        return {
            "WEIGHT": _DTYPES[self.weight],
            "RESIDUAL": self.residual,
            "GRAD": _DTYPES[self.grad],
            "LAYOUT": self.layout,
            "CHUNK": self.chunk,
            "GROUPS": ODD_GROUPS if self.layout == "any" else GROUPS,
            **{"num_warps": 1, "enable_fp_fusion": False},
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
    for kind, chosen in _classes(entries).items():
        multipliers = [lr_multipliers[i] for i, _ in chosen] if lr_multipliers else None
        table, chunks, num_chunks = _tables(entries, chosen, kind, lr_multiplier=multipliers)
        with torch.cuda.device_of(table):
            options = {"AMAX": kind.amax, **kind.options, "maxnreg": kind.registers}
            adamw_step_kernel[(num_chunks,)](table, chunks, **options)
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
    scalars: Any = None
    return (
        [kind.layout for kind in _classes([(matrix, scalars)])] == ["flat"]
        and payload.qdata.data_ptr() % 16 == 0
        and max(matrix.weight.shape) <= _LARGEST_SIDE
        and (matrix.amax is not None or payload.granularity == "block_128x128")
    )


def update_rms(entries: Sequence[Entry]) -> Tensor:
    """Compute `update_rms_reference` of every matrix, (len(entries),) float32.

    The order of the sums is fixed, so results repeat bit for bit.
    """
    bare = {"amax": None, "payload": None, "memo": None}
    entries = [(matrix._replace(**bare), scalars) for matrix, scalars in entries]
    result = torch.zeros(len(entries), device=entries[0][0].weight.device, dtype=torch.float32)
    classes: dict[tuple[_Class, bool], Chosen] = {}
    for kind, chosen in _classes(entries).items():
        without_weight = kind._replace(weight=torch.bfloat16, residual=False)
        for one in chosen:
            coupled = bool(entries[one[0]][1].weight_decay)
            classes.setdefault((kind if coupled else without_weight, coupled), []).append(one)
    for (kind, coupled), chosen in classes.items():
        update_rms = [result[i] for i, _ in chosen]
        table, chunks, num_chunks = _tables(entries, chosen, kind, update_rms=update_rms)
        partial = result.new_empty(num_chunks)
        with torch.cuda.device_of(table):
            options = {"COUPLED": coupled, **kind.options}
            update_squares_kernel[(num_chunks,)](table, chunks, partial, **options)
            update_rms_kernel[(len(chosen),)](
                table,
                partial,
                CHUNK=CHUNK,
                BLOCK_SIZE=PARTIALS,
                num_warps=4,
                enable_fp_fusion=True,
            )
    return result


def _classes(entries: Sequence[Entry]) -> "dict[_Class, Chosen]":
    """Map each class to its entries; empty matrices belong to no class."""
    classes: dict[_Class, Chosen] = {}
    last, chosen = None, Chosen()
    of_matrices = [m.memo[0] if m.memo else _fixed(m) for m, _ in entries]
    grads = [m.grad[0] if m.grad.__class__ is GradientParts else m.grad for m, _ in entries]
    addresses = map(Tensor.data_ptr, grads)
    for i, (fixed, grad, address) in enumerate(zip(of_matrices, grads, addresses, strict=True)):
        if fixed.size:
            kind = _kind(fixed.parts, grad.dtype, (fixed.address_bits | address) % 16 == 0)
            if kind is not last:  # hash it once for a run of matrices
                last, chosen = kind, classes.setdefault(kind, [])
            chosen.append((i, fixed))
    return classes


class Fixed:
    """What a matrix has in common from step to step: all but its gradient and scalars.

    Attributes:
        addresses: the first fields of a `Record`, 0 for a tensor that does not exist.
        shape: rows and columns, row length and start, of a `Record`.
        size: number of elements.
        address_bits: all bits that are set in an address of weight, residual or moments.
        parts: what chooses the class, besides the gradient and the alignment.
    """

    def __init__(self, matrix: WeightMatrix) -> None:
        weight, residual, _, first, second, row, col, row_length, amax, payload, *_ = matrix
        casts = (None, None) if payload is None else payload[2:]
        tensors = (weight, residual, None, None, None, *first, *second)
        tensors = (*tensors, None, None, amax, *casts, None)
        self.addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        rows, cols = weight.shape
        self.shape = rows, cols, row_length & _MASK32, (row * row_length + col) & _MASK32
        self.size = rows * cols
        self.address_bits = 0
        for tensor in (weight, residual, first.qdata, second.qdata):
            if tensor is not None:
                assert tensor.is_contiguous()
                self.address_bits |= tensor.data_ptr()
        whole_groups = row_length == cols and cols % GROUP_SIZE == 0
        layout = "any" if cols % 16 else "flat" if whole_groups else "rows"
        written = amax is not None, None if payload is None else payload[:2]
        self.parts = weight.dtype, residual is not None, layout, *written


@functools.cache
def _kind(parts: Any, grad: torch.dtype, is_aligned: bool) -> _Class:
    weight, residual, layout, amax, payload = parts
    layout = layout if is_aligned else "any"
    if payload is None:
        return _Class(weight, residual, grad, layout, amax, "", False)
    assert layout == "flat"
    return _Class(weight, residual, grad, "squares", amax, *payload)


Chosen = list[tuple[int, Fixed]]
"""Entries of one class: index of each, and what its matrix has in common from step to step."""


def _fixed(matrix: WeightMatrix) -> Fixed:
    memo = [] if matrix.memo is None else matrix.memo
    if not memo:
        memo.append(Fixed(matrix))
    return memo[0]


def _tables(
    entries: Sequence[Entry], chosen: Chosen, kind: _Class, **numbers_at: Sequence[Any] | None
) -> tuple[Tensor, Tensor, int]:
    """Build, on the device, a record per matrix and the matrix index of each program.

    Args:
        entries: the entries of a step.
        chosen: those of a class.
        kind: the class.
        numbers_at: tensors or None for each of them, by the field that has their address.
    Returns:
        records (M, fields of Record) int64, matrix indices (P or P + 1,) int32, and the number of
        programs P.
    """
    entries = [entries[i] for i, _ in chosen]
    template_of = _template.__wrapped__ if None in [m.memo for m, _ in entries] else _template
    template, first = template_of(tuple([fixed for _, fixed in chosen]), kind)
    device = entries[0][0].weight.device
    # Pinned: a copy from pageable memory would wait for the kernels before it.
    host = torch.empty(
        template.numel(), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
    ).copy_(template)
    grads: Any = [matrix.grad for matrix, _ in entries]
    parts = itertools.chain.from_iterable(grads) if kind.grad == torch.uint8 else grads
    scalars = [s for _, s in entries]
    distinct = dict(zip(map(id, scalars), scalars, strict=True))
    # A `Record`'s numbers, in its order.
    numbers = {i: array("f", ((-1.0) ** s.maximize, *s[:8])).tobytes() for i, s in distinct.items()}
    streams = stream_states(
        _numbers("q", [matrix.number for matrix, _ in entries]),
        _numbers("Q", [s.stream for s in scalars]),
    )
    floats = bytearray().join([numbers[i] for i in map(id, scalars)])
    columns = {
        "grad": _numbers("q", map(Tensor.data_ptr, parts)),
        "key0": streams.view(_HALF),
        "grad_sign": torch.frombuffer(floats, dtype=_HALF),
    }
    for name, tensors in numbers_at.items():
        if tensors:
            columns[name] = _numbers("q", [0 if x is None else x.data_ptr() for x in tensors])
    size = len(entries) * len(Record._fields)
    records = host[:size].view(len(entries), -1)
    for name, column in columns.items():
        values = column.view(len(entries), -1)
        records[:, _AT[name] : _AT[name] + values.shape[1]] = values
    buffer = host.to(device, non_blocking=True)
    return buffer[:size].view(len(entries), -1), buffer[size:].view(torch.int32), first


def _numbers(code: str, numbers: Iterable[int]) -> Tensor:
    # Through an array, because torch.tensor inspects each number of a list in turn.
    return torch.frombuffer(array(code, numbers), dtype=torch.int64)


@functools.lru_cache(maxsize=256)
def _template(matrices: tuple[Fixed, ...], kind: _Class) -> tuple[Tensor, int]:
    """Return what `_tables` copies, without gradients and scalars, and the number of programs."""
    places: list[int] = []
    counts, first = [], 0
    for fixed in matrices:
        rows, cols = fixed.shape[:2]
        groups = rows * num_groups(cols)
        if kind.layout == "squares":
            groups = cdiv(rows, 128) * cdiv(cols, 128) * SQUARE_CHUNK
        places += (*fixed.addresses, first, groups, *fixed.shape)
        places += [0] * (len(Record._fields) - _AT["key0"])
        counts.append(cdiv(groups, kind.chunk))
        first += counts[-1]
    host = torch.zeros(len(places) + cdiv(first, 2), dtype=torch.int64, device="cpu")
    host[: len(places)] = _numbers("q", places)
    owners = torch.arange(len(matrices), dtype=torch.int32, device="cpu")
    repeats = torch.tensor(counts, device="cpu", dtype=torch.int64)
    chunks = host[len(places) :].view(torch.int32)
    chunks[:first] = owners.repeat_interleave(repeats, output_size=first)
    return host, first
