"""SwiGLU on CUDA: the twin of `torch_fp8.ops.swiglu`, up to the last bits of exp.

What each reads and writes, per element of BF16, is: `swiglu_save` 4 of gate and up, and 2;
`swiglu_quantize` 4, 1 for each layout and, saving, 2.

Legend: R rows, C columns. Launch configurations are fixed, not tuned at run time.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.fused_launch import (
    TYPES,
    amax_bits,
    fits_tiles,
    fused_flags,
    no_cast,
    saved_outputs,
    scale_source,
)
from torch_fp8.kernels.launch_math import cdiv
from torch_fp8.kernels.quantize import (
    BLOCK,
    TILE_WARPS,
    Tile,
    amax_slot,
    pointers,
    quantize_2d,
    whole_tile,
)
from torch_fp8.kernels.swiglu_kernels import swiglu_cast_kernel
from torch_fp8.quantization.payload_shape import Layouts

# Where no column layout asks for 128 rows: 16 elements of each operand for each of 256 threads.
ROWS, WARPS = 32, 8

# Column groups of 128 take tiles of 128 rows. Others are left with half of it, which is 64
# contiguous bytes of a transposed store, with as many warps as need no spill.
WHOLE_TILES = ("block_1x128", "block_128x128")
COLUMN_ROWS = 64


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
    return (*saved, largest.view(torch.float32))


def swiglu_quantize(
    gate: Tensor, up: Tensor, smooth: Tensor | None, options: CastOptions, save: bool
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.swiglu.swiglu_quantize`."""
    fused, whole = is_fused(options, gate, up), None
    if options.needs_amax and fused and not save:  # saving comes with gradients, and spills
        whole = whole_tile(gate, options.columnwise)
    if options.needs_amax and whole is None:
        *saved, amax = swiglu_save(gate, up, smooth, save)
        known = options._replace(amax=amax)
        return (*swiglu_quantize(gate, up, smooth, known, False)[:4], *saved)
    if fused:
        made, slot = options.new_layouts(gate), amax_slot(options)
        return (*made, *_launch(gate, up, smooth, options, save, made, slot, whole))
    h = gate.new_empty(gate.shape)
    saved = _launch(gate, up, smooth, None, save, (h, None, None, None), None)
    return (*quantize_2d(h, options), *saved)


def _launch(
    gate: Tensor,
    up: Tensor,
    smooth: Tensor | None,
    options: CastOptions | None,
    save: bool,
    made: Layouts,
    largest: Tensor | None,
    whole: Tile | None = None,
) -> tuple[Tensor | None, ...]:
    """Fill the layouts, and the amax or those of columns, in one launch; return what is saved.

    Args:
        made: without `options` the first of them is the result itself, (R, C) contiguous, or None.
        whole: the tile of a cast that takes all of them at once.
    """
    rows, cols = gate.shape
    saved = (*saved_outputs(gate, save), *saved_outputs(up, save))
    block_r, warps = tile(options)
    block_r, block_c, warps = whole or (block_r, BLOCK, warps)
    if gate.numel():
        with torch.cuda.device_of(gate):
            swiglu_cast_kernel[(cdiv(rows, block_r) * cdiv(cols, block_c),)](
                gate,
                up,
                *pointers((smooth, largest, *saved), gate),
                gate if options is None else scale_source(options, gate),
                *pointers(made, gate),
                *gate.stride(),
                *up.stride(),
                0 if smooth is None else smooth.stride(0),
                rows,
                cols,
                OUT=TYPES[gate.dtype],
                SMOOTH=smooth is not None,
                SAVE=save,
                AMAX="" if largest is None else "columns" if largest.ndim else "tensor",
                **(no_cast(made) if options is None else fused_flags(options, whole is not None)),
                BLOCK_R=block_r,
                BLOCK_C=block_c,
                num_warps=warps,
                enable_fp_fusion=False,
            )
    return saved


def is_fused(options: CastOptions, *inputs: Tensor) -> bool:
    """Return whether one launch computes and casts the result without a spill.

    A tile of 128 rows takes a few registers more than there are where scales are no powers of two,
    and so divide in five steps, where the column layout is alone, neither of which a recipe asks
    for, or where what is loaded is float32.
    """
    whole = options.granularity in WHOLE_TILES and options.columnwise
    square = options.granularity == "block_128x128"
    common = square or (options.rowwise and options.power_of_two)
    common = common and inputs[0].dtype != torch.float32
    return fits_tiles(options, *inputs) and (common or not whole)


def tile(options: CastOptions | None) -> tuple[int, int]:
    """Return a tile's rows and warps."""
    granularity = "" if options is None else options.granularity
    if options is None or (granularity != "block_128x128" and not options.columnwise):
        return ROWS, WARPS
    if granularity in WHOLE_TILES:
        return BLOCK, TILE_WARPS
    return COLUMN_ROWS, WARPS if granularity == "tensorwise" else TILE_WARPS
