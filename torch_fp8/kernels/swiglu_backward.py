"""SwiGLU's backward on CUDA: `torch_fp8.ops.swiglu_backward`, up to the last bits of exp.

Memory traffic in bytes per BF16 element: `swiglu_backward_quantize` reads 2 of the gradient and 2
of saved gate and up, and writes 2 per layout; `swiglu_backward_amax` reads the same 4. The
launchers ``gate_up_*`` write both gradients into the halves of one matrix (R, 2C).

Kernels compute in float32 without fused multiply-adds, so all of them get the same gradients.
Launch configurations are fixed, not tuned at run time.

Legend: R rows, C columns of gate and of up; ``sig = sigmoid(gate)``,
``dgate = grad * up * (sig + gate * sig * (1 - sig))``, ``dup = grad * gate * sig``.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fp8.kernels.arguments import BackwardInputs, CastOptions
from torch_fp8.kernels.cast_launch import (
    BLOCK,
    TYPES,
    amax_bits,
    amax_slot,
    fused_flags,
    pointers,
    scale_source,
)
from torch_fp8.kernels.fast_math import fast_sigmoid
from torch_fp8.kernels.quantize import quantize_2d
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.swiglu import ROW_TILE, is_fused, tile_of
from torch_fp8.kernels.tiles import (
    load_saved,
    load_tile,
    push_amax,
    rounded,
    store_cast,
    tile_at,
)
from torch_fp8.quantization.payload_shape import Layouts


@triton.jit
def _gradients(grad, gate, up):
    """Return (dgate, dup)."""
    sig = fast_sigmoid(gate)
    silu = gate * sig
    return grad * up * (sig + silu * (1.0 - sig)), grad * silu


@triton.jit
def _moved(tile, start, BLOCK_C: tl.constexpr):
    """Return the tile of a matrix (R, 2C) that is `tile` of its columns from `start` on."""
    tile_r, tile_c, r, c, mask = tile
    return tile_r, tile_c + start // BLOCK_C, r, c + start, mask


@quick
@triton.jit(
    do_not_specialize_on_alignment=["scale_ptr", "dup_scale_ptr", "amax_ptr", "dup_amax_ptr"]
)
def swiglu_backward_cast_kernel(
    grad_ptr,
    gate_ptr,
    gate_s_ptr,
    up_ptr,
    up_s_ptr,
    scale_ptr,
    dup_scale_ptr,
    amax_ptr,
    dup_amax_ptr,
    dgate_q_ptr,
    dgate_s_ptr,
    dgate_qt_ptr,
    dgate_st_ptr,
    dup_q_ptr,
    dup_s_ptr,
    dup_qt_ptr,
    dup_st_ptr,
    grad_r,
    grad_c,
    gate_r,
    gate_c,
    gate_s_r,
    gate_s_c,
    up_r,
    up_c,
    up_s_r,
    up_s_c,
    rows,
    cols,
    dgate_start,  # first columns of both gradients, if JOINED
    dup_start,
    OUT: tl.constexpr,
    GATE_SAVED: tl.constexpr,
    UP_SAVED: tl.constexpr,
    JOINED: tl.constexpr,  # both gradients go to dgate's pointers, and no group spans both
    AMAX: tl.constexpr,  # amaxes to raise: at two pointers ("both"), in a row ("pair"), or "" none
    SCALE: tl.constexpr,  # see `store_cast`
    GROUP: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute one tile of dgate and of dup; store or cast them, and raise their amaxes."""
    tile = tile_at(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C)
    _, _, r, c, mask = tile
    gate = (gate_ptr, gate_s_ptr, gate_r, gate_c, gate_s_r, gate_s_c)
    gate = load_saved(gate, tile, rows, cols, GATE_SAVED)
    up = (up_ptr, up_s_ptr, up_r, up_c, up_s_r, up_s_c)
    up = load_saved(up, tile, rows, cols, UP_SAVED)
    grad = load_tile(grad_ptr, grad_r, grad_c, r, c, mask)
    dgate, dup = _gradients(grad, gate, up)
    dgate, dup = rounded(dgate, OUT), rounded(dup, OUT)
    if AMAX == "pair":
        dup_amax_ptr = amax_ptr + 1
    elif JOINED:
        dup_amax_ptr = amax_ptr
    if AMAX != "":
        push_amax(amax_ptr, dgate)
        push_amax(dup_amax_ptr, dup)
    if ROW or COL:
        gate = (dgate_q_ptr, dgate_s_ptr, dgate_qt_ptr, dgate_st_ptr)
        if JOINED:
            store_cast(
                *(dgate, scale_ptr, gate, _moved(tile, dgate_start, BLOCK_C), rows, cols * 2),
                *(SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL, dgate_start + cols),
            )
            store_cast(
                *(dup, scale_ptr, gate, _moved(tile, dup_start, BLOCK_C), rows, cols * 2),
                *(SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL, dup_start + cols),
            )
        else:
            up = (dup_q_ptr, dup_s_ptr, dup_qt_ptr, dup_st_ptr)
            store_cast(
                *(dgate, scale_ptr, gate, tile, rows, cols),
                *(SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL),
            )
            store_cast(
                *(dup, dup_scale_ptr, up, tile, rows, cols),
                *(SCALE, GROUP, E5M2, POWER_OF_TWO, ROW, COL),
            )


_NOTHING: Layouts = (None, None, None, None)


def swiglu_backward(inputs: BackwardInputs) -> tuple[Tensor, Tensor]:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward`."""
    grad, dtype = inputs.grad, inputs.out_dtype
    dgate, dup = grad.new_empty(grad.shape, dtype=dtype), grad.new_empty(grad.shape, dtype=dtype)
    _launch(inputs, (dgate, *_NOTHING[1:], dup, *_NOTHING[1:]))
    return dgate, dup


def swiglu_backward_amax(inputs: BackwardInputs) -> Tensor:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward_amax`."""
    largest = amax_bits(inputs.grad, 2)
    _launch(inputs, _NOTHING * 2, largest=largest)
    return largest.view(torch.float32)


def swiglu_backward_quantize(
    inputs: BackwardInputs,
    options: CastOptions,
    dup_scale: Tensor | None = None,
    dup_amax: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """See `torch_fp8.ops.swiglu_backward.swiglu_backward_quantize`."""
    grad, casts = inputs.grad, options.of_gradients(dup_scale, dup_amax)
    if _casts_at_once(inputs, options):
        layouts = tuple(t for cast in casts for t in cast.new_layouts(grad))
        _launch(inputs, layouts, casts)
        return layouts
    gradients = swiglu_backward(inputs)
    return tuple(t for d, cast in zip(gradients, casts, strict=True) for t in quantize_2d(d, cast))


def gate_up_backward(inputs: BackwardInputs, gate_first: bool) -> Tensor:
    """See `torch_fp8.ops.swiglu_backward.gate_up_backward`."""
    rows, cols = inputs.grad.shape
    both = inputs.grad.new_empty((rows, 2 * cols), dtype=inputs.out_dtype)
    _launch(inputs, (both, *_NOTHING[1:], *_NOTHING), joined=_starts(cols, gate_first))
    return both


def gate_up_backward_amax(inputs: BackwardInputs) -> Tensor:
    """See `torch_fp8.ops.swiglu_backward.gate_up_backward_amax`."""
    largest = amax_bits(inputs.grad)
    _launch(inputs, _NOTHING * 2, largest=largest, joined=(0, 0))
    return largest.view(torch.float32)


def gate_up_backward_quantize(
    inputs: BackwardInputs, gate_first: bool, options: CastOptions
) -> Layouts:
    """See `torch_fp8.ops.swiglu_backward.gate_up_backward_quantize`."""
    grad = inputs.grad
    # A block with columns of both gradients would span two tiles.
    whole = options.granularity == "tensorwise" or grad.shape[1] % BLOCK == 0
    if not (whole and _casts_at_once(inputs, options)):
        return quantize_2d(gate_up_backward(inputs, gate_first), options)
    layouts = options.new_layouts(grad, 2 * grad.shape[1])
    casts = (options, options._replace(scale=None, amax=None))
    _launch(inputs, (*layouts, *_NOTHING), casts, joined=_starts(grad.shape[1], gate_first))
    return layouts


def _starts(cols: int, gate_first: bool) -> tuple[int, int]:
    """Return the first columns of dgate and dup in a matrix with both."""
    return (0, cols) if gate_first else (cols, 0)


def _casts_at_once(inputs: BackwardInputs, options: CastOptions) -> bool:
    """Return whether one launch can compute and cast both gradients.

    Registers cannot hold both for a tile of 128 rows.
    """
    fits = is_fused(options, inputs.grad, inputs.gate, inputs.up)
    return fits and tile_of(options).rows < BLOCK


def _launch(
    inputs: BackwardInputs,
    layouts: Sequence[Tensor | None],
    casts: Sequence[CastOptions | None] = (None, None),
    largest: Tensor | None = None,
    joined: tuple[int, int] | None = None,
) -> None:
    """Fill the layouts of both gradients and raise their amaxes in one launch.

    Args:
        layouts: ``(q, s, qt, st)`` of dgate, then of dup; if `joined`, of one matrix, then None.
            Without `casts`, each q is the plain gradient or None.
        casts: cast options of dgate and dup, which differ only in scale and amax; or None twice.
        largest: int32 bits of the amaxes to raise without `casts`, (2,), or if `joined` of one for
            both, (); or None.
        joined: first columns of dgate and dup, if both are parts of one matrix; else None.
    """
    grad, gate, gate_scale, up, up_scale, out_dtype = inputs
    if not grad.numel():
        return
    strides = [*grad.stride()]
    for x, scale in ((gate, gate_scale), (up, up_scale)):
        strides += [*x.stride(), *((0, 0) if scale is None else scale.stride())]
    slots = [amax_slot(cast) for cast in casts]
    if largest is not None:
        slots = [largest, None]
    both = slots[0] is not None
    swiglu_backward_cast_kernel[ROW_TILE.grid(grad)](
        *pointers((grad, gate, gate_scale, up, up_scale), grad),
        *(scale_source(cast, grad) for cast in casts),
        *pointers((*slots, *layouts), grad),
        *strides,
        *grad.shape,
        *(joined or (0, 0)),
        OUT=TYPES[out_dtype],
        GATE_SAVED=gate_scale is not None,
        UP_SAVED=up_scale is not None,
        JOINED=joined is not None,
        AMAX="pair" if largest is not None and largest.ndim else "both" if both else "",
        **fused_flags(casts[0], layouts),
        **ROW_TILE.options,
        enable_fp_fusion=False,
    )
