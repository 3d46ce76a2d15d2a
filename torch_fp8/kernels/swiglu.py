"""SwiGLU on CUDA: the twin of `torch_fp8.swiglu`, up to the last bits of exp.

What each reads and writes, per element of BF16, is: `swiglu_save` 4 of gate and up, and 2;
`swiglu_quantize` 4, 1 for each layout and, saving, 2; `swiglu_backward_quantize` 2 of the gradient,
2 of saved gate and up, and 2 for each layout; `swiglu_backward_amax` 4 of the same.

Legend: R rows, C columns. Launch configurations are fixed, not tuned at run time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fp8.kernels.grid import cdiv
from torch_fp8.kernels.producers import (
    TYPES,
    Cast,
    amax_bits,
    payload,
    save_unfused,
    saved_outputs,
)
from torch_fp8.kernels.quantize import BLOCK, TILE_WARPS
from torch_fp8.kernels.swiglu_tiles import (
    swiglu_backward_cast_kernel,
    swiglu_backward_kernel,
    swiglu_cast_kernel,
    swiglu_kernel,
)

# Where no column layout asks for 128 rows: 16 elements of each operand for each of 256 threads.
ROWS, WARPS = 32, 8

# Column groups of 128 take tiles of 128 rows. Others are left with half of it, which is 64
# contiguous bytes of a transposed store, with as many warps as need no spill.
WHOLE_TILES = ("block_1x128", "block_128x128")
COLUMN_ROWS = 64

_NO_CAST = {
    "SCALE": "given",
    "GROUP": BLOCK,
    "E5M2": False,
    "POWER_OF_TWO": False,
    "ROW": False,
    "COL": False,
}


def swiglu(gate: Tensor, up: Tensor, smooth: Tensor | None) -> Tensor:
    """See `torch_fp8.swiglu.swiglu`."""
    rows, cols = gate.shape
    h = gate.new_empty((rows, cols))
    if h.numel():
        with torch.cuda.device_of(gate):
            swiglu_kernel[(cdiv(rows, ROWS) * cdiv(cols, BLOCK),)](
                gate,
                up,
                h if smooth is None else smooth,
                h,
                *gate.stride(),
                *up.stride(),
                0 if smooth is None else smooth.stride(0),
                rows,
                cols,
                SMOOTH=smooth is not None,
                BLOCK_R=ROWS,
                BLOCK_C=BLOCK,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )
    return h


def swiglu_save(
    gate: Tensor, up: Tensor, smooth: Tensor | None, save: bool = True
) -> tuple[Tensor, ...]:
    """See `torch_fp8.swiglu.swiglu_save`."""
    *saved, amax = _cast(gate, up, smooth, None, save=save, amax=True)[4:]
    return (*saved, amax)


def swiglu_quantize(
    gate: Tensor,
    up: Tensor,
    smooth: Tensor | None,
    amax: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_two: bool,
    row: bool,
    col: bool,
    save: bool,
) -> tuple[Tensor, ...]:
    """See `torch_fp8.swiglu.swiglu_quantize`."""
    cast = Cast(amax, scale, dtype, granularity, power_of_two, row, col)
    if is_fused(cast, gate, up):
        return _cast(gate, up, smooth, cast, save=save, amax=scale is not None)
    made = cast.unfused(swiglu(gate, up, smooth))
    saved = (*save_unfused(gate, save), *save_unfused(up, save))
    if scale is None:
        return (*made, *saved, gate.new_empty(0, dtype=torch.float32))
    return (*made, *saved, _cast(gate, up, smooth, None, save=False, amax=True)[8])


def _cast(
    gate: Tensor, up: Tensor, smooth: Tensor | None, cast: Cast | None, *, save: bool, amax: bool
) -> tuple[Tensor, ...]:
    """What `swiglu_quantize` returns, from one launch; without a `cast` no layouts."""
    rows, cols = gate.shape
    largest = amax_bits(gate) if amax else amax_bits(gate, 0)
    gate_q, gate_s = saved_outputs(gate, save)
    up_q, up_s = saved_outputs(up, save)
    q, s, qt, st = made = (gate_q, gate_s) * 2 if cast is None else cast.outputs(gate)
    block_r, warps = _tile(cast)
    if gate.numel():
        with torch.cuda.device_of(gate):
            swiglu_cast_kernel[(cdiv(rows, block_r) * cdiv(cols, BLOCK),)](
                gate,
                up,
                gate_s if smooth is None else smooth,
                largest,
                payload(gate_q),
                gate_s,
                payload(up_q),
                up_s,
                s if cast is None else cast.source(s),
                payload(q),
                s,
                payload(qt),
                st,
                *gate.stride(),
                *up.stride(),
                0 if smooth is None else smooth.stride(0),
                rows,
                cols,
                OUT=TYPES[gate.dtype],
                SMOOTH=smooth is not None,
                SAVE=save,
                AMAX=amax,
                **(_NO_CAST if cast is None else cast.flags()),
                BLOCK_R=block_r,
                BLOCK_C=BLOCK,
                num_warps=warps,
                enable_fp_fusion=False,
            )
    return (*made, gate_q, gate_s, up_q, up_s, largest.view(torch.float32))


def is_fused(cast: Cast, *inputs: Tensor) -> bool:
    """Whether one launch makes it, without a spill.

    A tile of 128 rows takes a few registers more than there are where scales are no powers of two,
    and so divide in five steps, where the column layout is alone, neither of which a recipe asks
    for, or where what is loaded is float32.
    """
    whole = cast.granularity in WHOLE_TILES and cast.col
    square = cast.granularity == "block_128x128"
    common = square or (cast.row and cast.power_of_two)
    common = common and inputs[0].dtype != torch.float32
    return cast.is_fused(*inputs) and (common or not whole)


def _tile(cast: Cast | None) -> tuple[int, int]:
    """Rows and warps of a tile."""
    if cast is None or (cast.granularity != "block_128x128" and not cast.col):
        return ROWS, WARPS
    if cast.granularity in WHOLE_TILES:
        return BLOCK, TILE_WARPS
    return COLUMN_ROWS, WARPS if cast.granularity == "tensorwise" else TILE_WARPS


def swiglu_backward(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `torch_fp8.swiglu.swiglu_backward`."""
    dgate = grad.new_empty(grad.shape, dtype=out_dtype)
    dup = grad.new_empty(grad.shape, dtype=out_dtype)
    inputs = (grad, gate, gate_scale, up, up_scale, smooth)
    store_gradients(inputs, out_dtype, dgate, dup, None)
    return dgate, dup


def swiglu_backward_amax(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `torch_fp8.swiglu.swiglu_backward_amax`."""
    largest = amax_bits(grad, 2)
    inputs = (grad, gate, gate_scale, up, up_scale, smooth)
    store_gradients(inputs, out_dtype, None, None, largest)
    return largest.view(torch.float32)


Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]


def _operands(inputs: Inputs, unused: Tensor) -> tuple[list[Tensor], list[int], dict[str, bool]]:
    """Pointers, strides and flags of what backward reads, in the order of its kernels."""
    grad, gate, gate_scale, up, up_scale, smooth = inputs
    pointers, strides = [grad], [*grad.stride()]
    for x, scale in ((gate, gate_scale), (up, up_scale)):
        pointers += [x, unused] if scale is None else [payload(x), scale]
        strides += [*x.stride(), *((0, 0) if scale is None else scale.stride())]
    pointers.append(unused if smooth is None else smooth)
    strides.append(0 if smooth is None else smooth.stride(0))
    flags = {
        "SMOOTH": smooth is not None,
        "GATE_SAVED": gate_scale is not None,
        "UP_SAVED": up_scale is not None,
    }
    return pointers, strides, flags


def store_gradients(
    inputs: Inputs,
    out_dtype: torch.dtype,
    dgate: Tensor | None,
    dup: Tensor | None,
    largest: Tensor | None,
    joined: bool = False,
) -> None:
    """Fills both gradients, or their amaxes, or all.

    Args:
        dgate, dup: (R, C) contiguous, or, `joined`, the halves of the rows of a matrix.
        largest: int32 bits, two, or `joined` one.
    """
    grad = inputs[0]
    rows, cols = grad.shape
    if not grad.numel():
        return
    unused = grad if dgate is None else dgate
    pointers, strides, flags = _operands(inputs, unused)
    with torch.cuda.device_of(grad):
        swiglu_backward_kernel[(cdiv(rows, ROWS) * cdiv(cols, BLOCK),)](
            *pointers,
            unused,
            unused if dup is None else dup,
            unused if largest is None else largest,
            *strides,
            rows,
            cols,
            OUT=TYPES[out_dtype],
            **flags,
            JOINED=joined,
            STORE=dgate is not None,
            AMAX=largest is not None,
            BLOCK_R=ROWS,
            BLOCK_C=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def swiglu_backward_quantize(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    smooth: Tensor | None,
    out_dtype: torch.dtype,
    amax: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    granularity: str,
    power_of_two: bool,
    row: bool,
    col: bool,
) -> tuple[Tensor, ...]:
    """See `torch_fp8.swiglu.swiglu_backward_quantize`."""
    inputs: Inputs = (grad, gate, gate_scale, up, up_scale, smooth)
    cast = Cast(amax, scale, dtype, granularity, power_of_two, row, col)
    largest = amax_bits(grad, 0 if scale is None else 2)
    if not is_fused(cast, grad, gate, up):
        dgate, dup = (grad.new_empty(grad.shape, dtype=out_dtype) for _ in range(2))
        store_gradients(inputs, out_dtype, dgate, dup, None if scale is None else largest)
        made = (*cast.part(0).unfused(dgate), *cast.part(1).unfused(dup))
        return (*made, largest.view(torch.float32))
    made = (*cast.outputs(grad), *cast.outputs(grad))
    cast_gradients(inputs, out_dtype, cast, made, largest)
    return (*made, largest.view(torch.float32))


def cast_gradients(
    inputs: Inputs,
    out_dtype: torch.dtype,
    cast: Cast,
    made: Sequence[Tensor],
    largest: Tensor,
    joined: bool = False,
) -> None:
    """Fills the layouts of both gradients, and their amaxes where the scale was given.

    Args:
        made: ``(q, s, qt, st)`` of dgate and of dup; `joined`, views of those of one matrix.
        largest: as of `store_gradients`.
    """
    grad = inputs[0]
    rows, cols = grad.shape
    pointers, strides, flags = _operands(inputs, grad)
    source = cast.source(made[1])
    block_r, warps = _tile(cast)
    with torch.cuda.device_of(grad):
        swiglu_backward_cast_kernel[(2 * cdiv(rows, block_r) * cdiv(cols, BLOCK),)](
            *pointers,
            source,
            largest,
            *(payload(t) if t.dtype == cast.dtype else t for t in made),
            *strides,
            source.stride(0) if source.ndim == 1 else 0,
            rows,
            cols,
            OUT=TYPES[out_dtype],
            **flags,
            JOINED=joined,
            AMAX=cast.scale is not None,
            **cast.flags(),
            BLOCK_R=block_r,
            BLOCK_C=BLOCK,
            num_warps=warps,
            enable_fp_fusion=False,
        )
