"""RMSNorm on CUDA: the twin of `torch_fp8.ops.rms_norm`, byte for byte if rstd is the same.

Memory traffic in bytes per BF16 element of x: `rms_norm_statistics` reads 2 and writes 1 if it
saves x; `rms_norm_quantize` reads 2 and writes 1 per layout; `rms_norm_quantize_once` reads 2,
saves 1 and writes 1 per layout; `rms_norm_backward` reads 2 of the gradient and 1 of saved x, and
writes 2 of dx.

Legend: R rows, C columns of x. Launch configurations are fixed, not tuned at run time.
"""

import torch
from torch import Tensor

from torch_fp8.kernels.arguments import CastOptions, NormBackwardInputs, NormInputs, NormWithRstd
from torch_fp8.kernels.cast_launch import (
    BLOCK,
    TILE_WARPS,
    TYPES,
    Tile,
    amax_bits,
    amax_slot,
    cdiv,
    fits_tiles,
    fused_flags,
    next_power_of_2,
    pointers,
    registers,
    saved_outputs,
    scale_source,
    whole_rows,
    whole_tile,
)
from torch_fp8.kernels.quantize import quantize_2d
from torch_fp8.kernels.rms_norm_kernels import (
    norm_backward_kernel,
    norm_cast_kernel,
    norm_cast_once_kernel,
    statistics_kernel,
)
from torch_fp8.quantization.payload_shape import Layouts, is_known, multiple_of_16

# 32 elements for each thread of 8 warps; 512 contiguous bytes of BF16.
PLAIN_TILE = Tile(32, 256, 8)

# A band of rows is read from memory only once if all active bands fit in the L2 cache: 36 MiB of an
# H200's 50, one band on each of 132 multiprocessors, 16 warps with more than 64 registers.
BAND_ROWS = {"tensorwise": 32, "block_1x32": 32, "block_1x128": 128, "block_128x128": 128}
MULTIPROCESSORS = 132
BANDS_IN_CACHE = 36 * 2**20
BAND_COLS = 256  # read at a time; half of it for bands of 128 rows

# Backward holds a row of the gradient, x, the weight and dw in registers, 16 elements of each per
# thread. Each multiprocessor has two slabs of rows; a slab's part of dw is 4 bytes per column.
BACKWARD_ROW_IN_REGISTERS = 8192
BACKWARD_SLABS = 264
WIDE_ROWS, WIDE_CHUNK = 4, 1024

# Rows that move one element at a time need an address and a mask per element.
ODD_ROW_IN_REGISTERS, ODD_CHUNK = 2048, 512


def rms_norm_statistics(
    inputs: NormInputs, save: bool, slot: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """See `torch_fp8.ops.rms_norm.rms_norm_statistics`.

    Args:
        slot: () int32 bits of an amax to raise and return, or None for a new one from 0.
    """
    x, weight, eps, _, out_dtype = inputs
    rows, cols = x.shape
    rstd = x.new_empty(rows, dtype=torch.float32)
    largest = amax_bits(x) if slot is None else slot
    saved = saved_outputs(x, save)
    if not x.numel():
        return rstd.fill_(eps).rsqrt_(), largest.view(torch.float32), *saved
    tile = whole_rows(cols, BLOCK)
    statistics_kernel[(cdiv(rows, tile.rows),)](
        x,
        weight,
        rstd,
        largest,
        *pointers(saved, x),
        *_numbers(inputs),
        OUT=TYPES[out_dtype],
        SAVE=save,
        IN_REGISTERS=tile.cols >= cols,
        **tile.options,
        enable_fp_fusion=False,
    )
    return rstd, largest.view(torch.float32), *saved


def _numbers(inputs: NormInputs) -> tuple[float, ...]:
    """Return the strides, sizes and constants of a kernel that computes statistics."""
    x, weight, eps, offset, _ = inputs
    return (*x.stride(), weight.stride(0), *x.shape, 1.0 / x.shape[1], eps, offset)


def rms_norm(norm: NormWithRstd) -> Tensor:
    """See `torch_fp8.ops.rms_norm.rms_norm`."""
    y = norm.x.new_empty(norm.x.shape, dtype=norm.out_dtype)
    _tiles(norm, None, (y, None, None, None))
    return y


def rms_norm_quantize(norm: NormWithRstd, options: CastOptions) -> Layouts:
    """See `torch_fp8.ops.rms_norm.rms_norm_quantize`."""
    if not fits_tiles(options, norm.x):
        return quantize_2d(rms_norm(norm), options)
    layouts = options.new_layouts(norm.x)
    _tiles(norm, options, layouts)
    return layouts


def _tiles(norm: NormWithRstd, options: CastOptions | None, layouts: Layouts) -> None:
    """Fill the layouts; without `options`, write the plain result into the first of them."""
    x, weight, rstd, offset, out_dtype = norm
    slot = amax_slot(options)
    tile = Tile(BLOCK, BLOCK, TILE_WARPS) if options else PLAIN_TILE
    if slot is not None:  # one more value per element: too many registers for a whole tile
        tile = Tile(BLOCK // 2, BLOCK, TILE_WARPS // 2)
    by_columns = options is not None and options.granularity == "block_1x128" and options.columnwise
    if x.numel():
        norm_cast_kernel[tile.grid(x)](
            x,
            weight,
            rstd,
            scale_source(options, x),
            *pointers((slot, *layouts), x),
            *x.stride(),
            weight.stride(0),
            rstd.stride(0),
            *x.shape,
            offset,
            OUT=TYPES[out_dtype],
            AMAX=slot is not None,
            **fused_flags(options, layouts),
            **tile.options,
            maxnreg=registers(tile.warps) if by_columns else None,
            enable_fp_fusion=False,
        )


def rms_norm_quantize_once(
    inputs: NormInputs, options: CastOptions, save: bool
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.rms_norm.rms_norm_quantize_once`."""
    finds_amax = options.needs_amax
    if fits_tiles(options, inputs.x):
        whole = None
        if finds_amax and not save:  # as in `swiglu_quantize`
            whole = whole_tile(inputs.x, options.columnwise)
        fills = not finds_amax and bands_fill_the_card(inputs.x, options.granularity)
        if whole is not None or fills:
            return _bands(inputs, options, save, whole)
    rstd, amax, *saved = rms_norm_statistics(inputs, save, amax_slot(options))
    if finds_amax or options.raises_amax:
        options = options._replace(amax=amax if finds_amax else None)
    return (*rms_norm_quantize(inputs.with_rstd(rstd), options), rstd, *saved)


def sum_norm_quantize_once(
    inputs: NormInputs, addend: Tensor, options: CastOptions, save: bool
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.rms_norm.sum_norm_quantize_once`."""
    x = inputs.x
    fits = options.scale is not None and fits_tiles(options, x)
    if not (fits and bands_fill_the_card(x, options.granularity)):
        total = x + addend
        return (*rms_norm_quantize_once(inputs._replace(x=total), options, save), total)
    total = x.new_empty(x.shape)
    inputs = inputs._replace(x=x.contiguous())
    return (*_bands(inputs, options, save, None, (addend.contiguous(), total)), total)


def bands_fill_the_card(x: Tensor, granularity: str) -> bool:
    """Return whether bands of whole rows occupy every multiprocessor and stay in the L2 cache."""
    rows, cols = x.shape
    if not is_known(rows):
        return False
    band = BAND_ROWS[granularity]
    at_work = MULTIPROCESSORS * band * cols * x.element_size()
    return rows >= MULTIPROCESSORS * band and at_work <= BANDS_IN_CACHE


def _band(x: Tensor, granularity: str) -> Tile:
    """Return the columns of a band that are read at once."""
    rows = BAND_ROWS[granularity]
    narrow = rows != BLOCK and x.element_size() > 2
    return Tile(
        rows, BLOCK if rows == BLOCK else BAND_COLS, TILE_WARPS // 2 if narrow else TILE_WARPS
    )


def _bands(
    inputs: NormInputs,
    options: CastOptions,
    save: bool,
    whole: Tile | None,
    addition: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """Compute and cast bands of whole rows, or all rows in the single tile `whole`.

    Args:
        addition: a tensor that is added to x first, and memory for the sum; or None.
    """
    x, weight, _, _, out_dtype = inputs
    rows, cols = x.shape
    layouts, slot = options.new_layouts(x), amax_slot(options)
    tile = whole or _band(x, options.granularity)
    if addition is None:
        statistics, (saved, scale) = x.new_empty(rows, dtype=torch.float32), saved_outputs(x, save)
    else:
        # One tensor for backward: rstd, and behind it the scales, whose columns lie one by one.
        shape = 1 + (cdiv(cols, BLOCK) if save else 0), multiple_of_16(rows)
        statistics, scale = x.new_empty(shape, dtype=torch.float32), None
        saved = x.new_empty(x.shape, dtype=torch.float8_e4m3fn) if save else None
    norm_cast_once_kernel[(cdiv(rows, tile.rows),)](
        x,
        *pointers(addition or (None, None), weight),
        weight,
        statistics,
        *pointers((slot, saved, scale), weight),
        scale_source(options, weight),
        *pointers(layouts, weight),
        *_numbers(inputs),
        OUT=TYPES[out_dtype],
        **fused_flags(options, layouts, whole is not None),
        SAVE=save,
        AMAX=slot is not None,
        ADD=addition is not None,
        **tile.options,
        maxnreg=registers(tile.warps) if whole else None,
        enable_fp_fusion=False,
    )
    if addition is None:
        return (*layouts, statistics, saved, scale)
    return (*layouts, statistics[0, :rows], saved, statistics[1:, :rows].t() if save else None)


def rms_norm_backward(inputs: NormBackwardInputs) -> tuple[Tensor, Tensor]:
    """See `torch_fp8.ops.rms_norm.rms_norm_backward`."""
    grad, x, x_scale, weight, rstd, offset, dx_dtype, weight_grad = inputs
    rows, cols = grad.shape
    dx = grad.new_empty((rows, cols), dtype=dx_dtype)
    if not grad.numel():
        return dx, grad.new_zeros(cols if weight_grad else 0, dtype=torch.float32)
    odd = cols % 16 or grad.stride(1) != 1 or x.stride(1) != 1
    wide = cols > (ODD_ROW_IN_REGISTERS if odd else BACKWARD_ROW_IN_REGISTERS)
    chunk = ODD_CHUNK if odd else WIDE_CHUNK
    block_c = chunk if wide else max(next_power_of_2(cols), BLOCK)
    block_r = WIDE_ROWS if wide else max(1, 2048 // block_c)
    tile = Tile(block_r, block_c, max(4, block_r * block_c // 512))
    rows_per_slab = cdiv(cdiv(rows, BACKWARD_SLABS), block_r) * block_r
    # A symbolic number that may be 1 would add a guard, so some slabs have no rows then.
    slabs = cdiv(rows, rows_per_slab) if is_known(rows) else BACKWARD_SLABS
    allocate = grad.new_zeros if wide and not is_known(rows) else grad.new_empty
    partial = allocate((slabs, cols) if weight_grad else (0,), dtype=torch.float32)
    saved = x_scale is not None
    norm_backward_kernel[(slabs,)](
        grad,
        *pointers((x,), x),
        x_scale if saved else partial,
        weight,
        rstd,
        dx,
        partial,
        *grad.stride(),
        *x.stride(),
        *(x_scale.stride() if x_scale is not None else (0, 0)),
        weight.stride(0),
        rstd.stride(0),
        *grad.shape,
        rows_per_slab,
        1.0 / cols,
        offset,
        SAVED=saved,
        WEIGHT_GRAD=weight_grad,
        WIDE=wide,
        **tile.options,
        enable_fp_fusion=False,
    )
    return dx, partial.sum(0) if weight_grad else partial
