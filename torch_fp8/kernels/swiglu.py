"""SwiGLU on CUDA: the twin of `torch_fp8.ops.swiglu`, up to the last bits of exp.

What each reads and writes, per element of BF16, is: `swiglu_save` 4 of gate and up, and 2;
`swiglu_quantize` 4, 1 for each layout and, saving, 2.

Legend: R rows, C columns. Launch configurations are fixed, not tuned at run time.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import ProducerCast
from torch_fp8.kernels.fused_launch import (
    TYPES,
    Cast,
    amax_bits,
    as_amax,
    cast_unfused,
    no_cast,
    registers,
    saved_outputs,
)
from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.quantize import BLOCK, TILE_WARPS, Tile, pointers, whole_tile
from torch_fp8.kernels.swiglu_kernels import swiglu_cast_kernel
from torch_fp8.quantization.payload_shape import Layouts

# Where no column layout asks for 128 rows: 16 elements of each operand for each of 256 threads.
ROWS, WARPS = 32, 8

# Column groups of 128 take tiles of 128 rows. Others are left with half of it, which is 64
# contiguous bytes of a transposed store, with as many warps as need no spill.
WHOLE_TILES = ("block_1x128", "block_128x128")
COLUMN_ROWS = 64
# Delayed casts, which end as `delayed_scale` says, with rows to pad: a mask for each layout.
ODD_DELAYED_ROWS = 32


def swiglu(gate: Tensor, up: Tensor, smooth: Tensor | None) -> Tensor:
    """See `torch_fp8.ops.swiglu.swiglu`."""
    h = gate.new_empty(gate.shape)
    _launch(gate, up, smooth, None, False, (h, None, None, None), None)
    return h


def swiglu_save(
    gate: Tensor, up: Tensor, smooth: Tensor | None, save: bool = True, by_column: bool = False
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.swiglu.swiglu_save`, and `by_column` `torch_fp8.ops.smooth`'s."""
    largest = amax_bits(gate, *gate.shape[1:] if by_column else ())
    saved = _launch(gate, up, smooth, None, save, (None,) * 4, largest)
    return (*saved, as_amax(largest))


def swiglu_quantize(
    gate: Tensor, up: Tensor, smooth: Tensor | None, options: ProducerCast, save: bool
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.swiglu.swiglu_quantize`."""
    cast = Cast.of(options)
    fused, whole = is_fused(cast, gate, up), None
    if cast.needs_amax and fused and not save:  # saving comes with gradients, and spills
        whole = whole_tile(gate, options.columnwise)
    if cast.needs_amax and whole is None:
        *saved, amax = swiglu_save(gate, up, smooth, save)
        known = cast.options._replace(amax=amax)
        return (*swiglu_quantize(gate, up, smooth, known, False)[:4], *saved, None)
    if fused:
        made, largest = cast.options.new_layouts(gate), cast.amax_bits(gate)
        saved = _launch(gate, up, smooth, cast, save, made, largest, whole)
        return (*made, *saved, as_amax(largest))
    h, largest = gate.new_empty(gate.shape), amax_bits(gate) if cast.takes_amax else None
    saved = _launch(gate, up, smooth, None, save, (h, None, None, None), largest)
    amax = as_amax(largest)
    return (*cast_unfused(h, options, amax), *saved, amax)


def _launch(
    gate: Tensor,
    up: Tensor,
    smooth: Tensor | None,
    cast: Cast | None,
    save: bool,
    made: Layouts,
    largest: Tensor | None,
    whole: Tile | None = None,
) -> tuple[Tensor | None, ...]:
    """Fill the layouts, and the amax or those of columns, in one launch; return what is saved.

    Args:
        made: without a `cast` the first of them is the result itself, (R, C) contiguous, or None.
        whole: the tile of a cast that takes all of them at once.
    """
    rows, cols = gate.shape
    saved = (*saved_outputs(gate, save), *saved_outputs(up, save))
    block_r, warps, maxnreg = tile(cast, rows)
    block_r, block_c, warps = whole or (block_r, BLOCK, warps)
    if gate.numel():
        with torch.cuda.device_of(gate):
            swiglu_cast_kernel[(cdiv(rows, block_r) * cdiv(cols, block_c),)](
                gate,
                up,
                *pointers((smooth, largest, *saved), gate),
                gate if cast is None else cast.source(gate),
                *pointers(made, gate),
                *((gate, gate, 0, 1.0) if cast is None else cast.history(gate)),
                *gate.stride(),
                *up.stride(),
                0 if smooth is None else smooth.stride(0),
                rows,
                cols,
                OUT=TYPES[gate.dtype],
                SMOOTH=smooth is not None,
                SAVE=save,
                AMAX="" if largest is None else "columns" if largest.ndim else "tensor",
                **(no_cast(made) if cast is None else cast.flags(whole is not None)),
                BLOCK_R=block_r,
                BLOCK_C=block_c,
                num_warps=warps,
                maxnreg=maxnreg,
                enable_fp_fusion=False,
            )
    return saved


def is_fused(cast: Cast, *inputs: Tensor) -> bool:
    """Return whether one launch computes and casts the result without a spill.

    A tile of 128 rows takes a few registers more than there are where scales are no powers of two,
    and so divide in five steps, where the column layout is alone, neither of which a recipe asks
    for, or where what is loaded is float32.
    """
    options = cast.options
    whole = options.granularity in WHOLE_TILES and options.columnwise
    square = options.granularity == "block_128x128"
    common = square or (options.rowwise and options.power_of_two)
    common = common and inputs[0].dtype != torch.float32
    return cast.is_fused(*inputs) and (common or not whole)


def tile(cast: Cast | None, rows: int) -> tuple[int, int, int | None]:
    """Return a tile's rows and warps, and the registers of a thread; None: left to Triton.

    rows: of the result.
    """
    granularity = "" if cast is None else cast.options.granularity
    if cast is None or (granularity != "block_128x128" and not cast.options.columnwise):
        return ROWS, WARPS, None
    if granularity in WHOLE_TILES:
        return BLOCK, TILE_WARPS, None
    if cast.past is not None:
        block_r = ODD_DELAYED_ROWS if rows % 16 else COLUMN_ROWS
        return block_r, TILE_WARPS, registers(TILE_WARPS)
    return COLUMN_ROWS, WARPS if granularity == "tensorwise" else TILE_WARPS, None
