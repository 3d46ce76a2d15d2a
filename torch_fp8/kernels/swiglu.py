"""SwiGLU on CUDA: the twin of `torch_fp8.ops.swiglu`, up to the last bits of exp.

Memory traffic in bytes per BF16 element: `swiglu_save` reads 4 of gate and up and writes 2;
`swiglu_quantize` reads 4, writes 1 per layout, and 2 if it saves gate and up.

Kernels compute in float32 without fused multiply-adds, so all of them get the same h. Launch
configurations are fixed, not tuned at run time.

Legend: R rows, C columns; ``h = gate * sigmoid(gate) * up * smooth``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions
from torch_fp8.kernels.cast_launch import (
    BLOCK,
    TILE_WARPS,
    TYPES,
    Tile,
    amax_bits,
    amax_slot,
    fits_tiles,
    fused_flags,
    pointers,
    saved_outputs,
    scale_source,
    whole_tile,
)
from torch_fp8.kernels.fast_math import fast_sigmoid
from torch_fp8.kernels.quantize import quantize_2d
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import (
    load_tile,
    push_amax,
    push_column_amaxes,
    save_tile,
    store_cast,
    tile_at,
)
from torch_fp8.quantization.payload_shape import Layouts


@triton.jit
def times_smooth(x, smooth_ptr, stride, c, cols, SMOOTH: tl.constexpr):
    """Multiply x by the smoothing factors of its columns, if there are any."""
    if SMOOTH:
        x *= tl.load(smooth_ptr + c * stride, mask=c < cols, other=0.0)[None, :]
    return x


@quick
@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
def swiglu_cast_kernel(
    gate_ptr,
    up_ptr,
    smooth_ptr,
    amax_ptr,
    gate_q_ptr,
    gate_s_ptr,
    up_q_ptr,
    up_s_ptr,
    scale_ptr,
    q_ptr,
    s_ptr,
    qt_ptr,
    st_ptr,
    gate_r,
    gate_c,
    up_r,
    up_c,
    smooth_stride,
    rows,
    cols,
    OUT: tl.constexpr,
    SMOOTH: tl.constexpr,
    SAVE: tl.constexpr,
    AMAX: tl.constexpr,  # amax to raise: of the "tensor", or of each of the "columns"; "": none
    SCALE: tl.constexpr,  # see `store_cast`
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute and store one tile of h (see `store_cast`), save gate and up, and raise amaxes."""
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C)
    _, _, r, c, mask = tile
    made = (q_ptr, s_ptr, qt_ptr, st_ptr)
    gate = load_tile(gate_ptr, gate_r, gate_c, r, c, mask)
    up = load_tile(up_ptr, up_r, up_c, r, c, mask)
    h = gate * fast_sigmoid(gate) * up
    h = times_smooth(h, smooth_ptr, smooth_stride, c, cols, SMOOTH).to(OUT)
    if SAVE:
        save_tile(gate, gate_q_ptr, gate_s_ptr, tile, rows, cols)
        save_tile(up, up_q_ptr, up_s_ptr, tile, rows, cols)
    h = h.to(tl.float32)  # only here: in OUT it needs fewer registers during the saves
    if AMAX == "tensor":
        push_amax(amax_ptr, h)
    if AMAX == "columns":
        push_column_amaxes(amax_ptr, h, c, cols)
    if ROW or COL:
        store_cast(h, scale_ptr, made, tile, rows, cols, SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL)


# Tile without a column layout: 16 elements of each operand for each of 256 threads.
ROW_TILE = Tile(32, BLOCK, 8)

# Column groups of 128 need tiles of 128 rows. Other column layouts use 64 rows, 64 contiguous bytes
# of a transposed store, and as many warps as it takes to avoid spills.
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
    """See `torch_fp8.ops.swiglu.swiglu_save`; `by_column`, see `smooth.swiglu_save_columns`."""
    largest = amax_bits(gate, *gate.shape[1:] if by_column else ())
    saved = _launch(gate, up, smooth, None, save, (None,) * 4, largest)
    return (*saved, largest.view(torch.float32))


def swiglu_quantize(
    gate: Tensor, up: Tensor, smooth: Tensor | None, options: CastOptions, save: bool
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.swiglu.swiglu_quantize`."""
    fused, whole = is_fused(options, gate, up), None
    if options.needs_amax and fused and not save:  # with saving, this kernel would spill
        whole = whole_tile(gate, options.columnwise)
    if options.needs_amax and whole is None:
        *saved, amax = swiglu_save(gate, up, smooth, save)
        known = options._replace(amax=amax)
        return (*swiglu_quantize(gate, up, smooth, known, False)[:4], *saved)
    if fused:
        layouts, slot = options.new_layouts(gate), amax_slot(options)
        return (*layouts, *_launch(gate, up, smooth, options, save, layouts, slot, whole))
    h = gate.new_empty(gate.shape)
    saved = _launch(gate, up, smooth, None, save, (h, None, None, None), None)
    return (*quantize_2d(h, options), *saved)


def _launch(
    gate: Tensor,
    up: Tensor,
    smooth: Tensor | None,
    options: CastOptions | None,
    save: bool,
    layouts: Layouts,
    largest: Tensor | None,
    whole: Tile | None = None,
) -> tuple[Tensor | None, ...]:
    """Fill the layouts and raise the amaxes in one launch; return the saved gate and up.

    Args:
        layouts: layouts to fill; without `options`, the first is the plain result, (R, C)
            contiguous, or None.
        largest: int32 bits of the amax, (), or of the columns' amaxes, (C,); or None.
        whole: tile that holds the whole result, or None.
    """
    saved = (*saved_outputs(gate, save), *saved_outputs(up, save))
    tile = whole or tile_of(options)
    if gate.numel():
        swiglu_cast_kernel[tile.grid(gate)](
            gate,
            up,
            *pointers((smooth, largest, *saved), gate),
            scale_source(options, gate),
            *pointers(layouts, gate),
            *gate.stride(),
            *up.stride(),
            0 if smooth is None else smooth.stride(0),
            *gate.shape,
            OUT=TYPES[gate.dtype],
            SMOOTH=smooth is not None,
            SAVE=save,
            AMAX="" if largest is None else "columns" if largest.ndim else "tensor",
            **fused_flags(options, layouts, whole is not None),
            **tile.options,
            enable_fp_fusion=False,
        )
    return saved


def is_fused(options: CastOptions, *inputs: Tensor) -> bool:
    """Return whether one launch can compute and cast the result without spilling registers.

    A tile of 128 rows would spill a few registers in three cases: scales that are not powers of two
    (division takes five steps), the column layout alone, and float32 inputs. No recipe needs the
    first two.
    """
    common = options.granularity == "block_128x128" or (options.rowwise and options.power_of_two)
    common = common and inputs[0].dtype != torch.float32
    whole = options.granularity in WHOLE_TILES and options.columnwise
    return fits_tiles(options, *inputs) and (common or not whole)


def tile_of(options: CastOptions | None) -> Tile:
    """Return the tile of a launch."""
    if options is None or (options.granularity != "block_128x128" and not options.columnwise):
        return ROW_TILE
    if options.granularity in WHOLE_TILES:
        return Tile(BLOCK, BLOCK, TILE_WARPS)
    return Tile(COLUMN_ROWS, BLOCK, 8 if options.granularity == "tensorwise" else TILE_WARPS)
