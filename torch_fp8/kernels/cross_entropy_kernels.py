"""The kernels of `torch_fp8.kernels.cross_entropy`.

Legend: R rows (tokens), C columns (classes); x product, z logits, see `LogitForm`.
Kernels compute in float32 without fused multiply-adds, which would skip a rounding of z.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.fast_math import fast_sigmoid
from torch_fp8.kernels.fp8_cast import cast_bounded
from torch_fp8.kernels.quick_launch import quick
from torch_fp8.kernels.tiles import LINE, padded, rounded

LOWEST = tl.constexpr(-3.4e38)
"""A finite number below all logits: differences of two infinities would be NaN."""


@triton.jit
def form_logits(x, form, OUT: tl.constexpr, FORM: tl.constexpr):
    """Return z and the tanh of a softcap.

    form: scale, softcap, its reciprocal, and the temperature's. FORM: "plain", if z is x; "scaled",
    without a softcap; "capped".
    """
    scale, cap, inverse_cap, inverse_temperature = form
    bounded = 0.0
    if FORM != "plain":
        x = rounded(x * scale, OUT)
        if FORM == "capped":
            bounded = rounded(2.0 * fast_sigmoid(2.0 * rounded(x * inverse_cap, OUT)) - 1.0, OUT)
            x = rounded(bounded * cap, OUT)
        x = rounded(x * inverse_temperature, OUT)
    return x, bounded


@triton.jit
def form_gradient(grad, bounded, form, OUT: tl.constexpr, FORM: tl.constexpr):
    """Return the gradient of x from that of z, rounded in each step as stock's is."""
    scale, cap, inverse_cap, inverse_temperature = form
    if FORM != "plain":
        grad = rounded(rounded(grad, OUT) * inverse_temperature, OUT)
        if FORM == "capped":
            grad = rounded(rounded(grad * cap, OUT) * (1.0 - bounded * bounded), OUT)
            grad = rounded(grad * inverse_cap, OUT)
        grad = rounded(grad * scale, OUT)
    return grad


@triton.jit
def exp(x):
    """Compute exp(x) in two instructions; below x = -87 it is 0."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 %power<1>;
        mul.f32 %power0, $1, 0f3FB8AA3B;
        ex2.approx.ftz.f32 $0, %power0;
        }
        """,
        "=r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def gradient(z, is_label, weight, token, SMOOTH: tl.constexpr, SPREAD: tl.constexpr):
    """Compute the gradient of z; see `torch_fp8.ops.cross_entropy`.

    token: mass, hit, smooth, spread, lse and entropy.
    """
    mass, hit, smooth, spread, lse, entropy = token
    log_p = z - lse
    p = exp(log_p)
    grad = p * mass
    if SMOOTH:
        grad -= smooth * weight
    if SPREAD:
        grad -= spread * p * (tl.maximum(log_p, LOWEST) + entropy)
    return tl.where(is_label, grad - hit, grad)


@triton.jit
def load_token(terms, at, mask, SMOOTH: tl.constexpr, SPREAD: tl.constexpr, KNOWN: tl.constexpr):
    """Load label, mass, hit, smooth, spread, lse and entropy; 0 for what does not exist.

    KNOWN: whether lse is known, and with SPREAD the entropy.
    """
    label_ptr, mass_ptr, hit_ptr, smooth_ptr, spread_ptr, lse_ptr, entropy_ptr = terms
    label = tl.load(label_ptr + at, mask=mask, other=-1)
    mass = tl.load(mass_ptr + at, mask=mask, other=0.0)
    hit = tl.load(hit_ptr + at, mask=mask, other=0.0)
    smooth = tl.load(smooth_ptr + at, mask=mask, other=0.0) if SMOOTH else 0.0
    spread = tl.load(spread_ptr + at, mask=mask, other=0.0) if SPREAD else 0.0
    lse = tl.load(lse_ptr + at, mask=mask, other=0.0) if KNOWN else 0.0
    entropy = tl.load(entropy_ptr + at, mask=mask, other=0.0) if SPREAD else 0.0
    return label, mass, hit, smooth, spread, lse, entropy


@triton.jit
def load_weight(weight_ptr, c, cols, WEIGHTED: tl.constexpr):
    """Load the weights of classes c."""
    return tl.load(weight_ptr + c, mask=c < cols, other=0.0) if WEIGHTED else 1.0


@quick
@triton.jit
def cross_entropy_kernel(
    logits_ptr,
    label_ptr,
    mass_ptr,
    hit_ptr,
    smooth_ptr,
    weight_ptr,
    spread_ptr,
    lse_ptr,
    entropy_ptr,
    loss_ptr,
    stride,
    cols,
    scale,
    cap,
    inverse_cap,
    inverse_temperature,
    FORM: tl.constexpr,  # see `form_logits`
    SMOOTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPREAD: tl.constexpr,
    KNOWN: tl.constexpr,  # lse is an input; else it and the loss are results
    ENTROPY: tl.constexpr,  # the entropy is a result
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a row's loss, and write the gradient over its logits, in two passes over the row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    OUT: tl.constexpr = logits_ptr.dtype.element_ty
    form = (scale, cap, inverse_cap, inverse_temperature)
    terms = (label_ptr, mass_ptr, hit_ptr, smooth_ptr, spread_ptr, lse_ptr, entropy_ptr)
    label, mass, hit, smooth, spread, lse, entropy = load_token(
        terms, row, True, SMOOTH, SPREAD, KNOWN
    )
    columns = tl.arange(0, BLOCK)
    if not KNOWN:
        # Read before a thread overwrites it: the reductions below have barriers.
        one = tl.arange(0, 1)
        at_label = tl.load(logits_ptr + label + one, mask=label + one >= 0, other=0.0)
        at_label, _label_tanh = form_logits(at_label.to(tl.float32), form, OUT, FORM)
        largest = tl.full((BLOCK,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        mean = tl.zeros((BLOCK,), tl.float32)
        weighted = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, cols, BLOCK):
            c = start + columns
            x = tl.load(logits_ptr + c, mask=c < cols, other=0.0).to(tl.float32)
            z, _tanh = form_logits(x, form, OUT, FORM)
            if SMOOTH:
                weight = load_weight(weight_ptr, c, cols, WEIGHTED)
                weighted += tl.where(c < cols, z * weight, 0.0)
            z = tl.where(c < cols, z, float("-inf"))
            higher = tl.maximum(largest, z)
            falls, shift = largest - higher, z - higher
            shrinks, p = exp(falls), exp(shift)
            if ENTROPY:  # of p * (z - largest), since p * z would cancel against lse
                mean = (mean + total * falls) * shrinks + p * tl.maximum(shift, LOWEST)
            total = total * shrinks + p
            largest = higher
        top = tl.max(largest, axis=0)
        falls = largest - top
        shrinks = exp(falls)
        mean = tl.sum((mean + total * falls) * shrinks, axis=0)
        total = tl.sum(total * shrinks, axis=0)
        log_total = tl.log(total)
        lse = top + log_total
        loss = mass * lse - hit * tl.sum(at_label, axis=0)
        if SMOOTH:
            loss -= smooth * tl.sum(weighted, axis=0)
        tl.store(loss_ptr + row, tl.where(label >= 0, loss, 0.0))
        tl.store(lse_ptr + row, lse)
        if ENTROPY:
            tl.store(entropy_ptr + row, log_total - mean / total)
    if GRADIENT:
        token = (mass, hit, smooth, spread, lse, entropy)
        for start in range(0, cols, BLOCK):
            c = start + columns
            x = tl.load(logits_ptr + c, mask=c < cols, other=0.0).to(tl.float32)
            z, bounded = form_logits(x, form, OUT, FORM)
            weight = load_weight(weight_ptr, c, cols, WEIGHTED)
            grad = gradient(z, c == label, weight, token, SMOOTH, SPREAD)
            grad = form_gradient(grad, bounded, form, OUT, FORM)
            tl.store(logits_ptr + c, grad.to(OUT), mask=c < cols)


@quick
@triton.jit
def cross_entropy_cast_kernel(
    logits_ptr,
    label_ptr,
    mass_ptr,
    hit_ptr,
    smooth_ptr,
    weight_ptr,
    spread_ptr,
    lse_ptr,
    entropy_ptr,
    scale_ptr,
    q_ptr,
    qt_ptr,
    sum_ptr,
    bias_ptr,
    stride,
    rows,
    cols,
    tiles,
    scale,
    cap,
    inverse_cap,
    inverse_temperature,
    FORM: tl.constexpr,  # see `form_logits`
    SMOOTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPREAD: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast `tiles` neighboring tiles of the gradient in a band of BLOCK_R rows.

    sum[:, part, r]: sums over the part's classes, without the label, of the gradient and of the
    payload; and the label's gradient. bias[band, c]: sums of the band's gradient.
    """
    band, part = tl.program_id(0), tl.program_id(1)
    # Offsets within a tile are 32-bit: 64-bit ones would take twice the registers.
    first_row = band.to(tl.int64) * BLOCK_R
    r = tl.arange(0, BLOCK_R)
    tile_r = r[:, None]
    tile_c = tl.arange(0, BLOCK_C)[None, :]
    rows_left = (rows - first_row).to(tl.int32)
    inside = tile_r < rows_left
    width, length = padded(cols, 16), padded(rows, 16)
    logits_ptr += first_row * stride
    q_ptr += first_row * width
    qt_ptr += first_row
    OUT: tl.constexpr = logits_ptr.dtype.element_ty
    form = (scale, cap, inverse_cap, inverse_temperature)
    terms = (label_ptr, mass_ptr, hit_ptr, smooth_ptr, spread_ptr, lse_ptr, entropy_ptr)
    label, mass, hit, smooth, spread, lse, entropy = load_token(
        terms, first_row + r, r < rows_left, SMOOTH, SPREAD, True
    )
    if SMOOTH:
        smooth = smooth[:, None]
    if SPREAD:
        spread, entropy = spread[:, None], entropy[:, None]
    label = label.to(tl.int32)[:, None]
    token = (mass[:, None], hit[:, None], smooth, spread, lse[:, None], entropy)
    payload_scale = tl.load(scale_ptr)
    exact = tl.zeros((BLOCK_R,), tl.float32)
    cast = tl.zeros((BLOCK_R,), tl.float32)
    at_label = tl.zeros((BLOCK_R,), tl.float32)
    for tile in range(part * tiles, tl.minimum((part + 1) * tiles, tl.cdiv(width, BLOCK_C))):
        first = tile * BLOCK_C
        c = first + tile_c
        mask = inside & (c < cols)
        x = tl.load(logits_ptr + first + (tile_r * stride + tile_c), mask=mask, other=0.0)
        z, bounded = form_logits(x.to(tl.float32), form, OUT, FORM)
        weight = load_weight(weight_ptr, c, cols, WEIGHTED)
        is_label = c == label
        grad = gradient(z, is_label, weight, token, SMOOTH, SPREAD)
        grad = tl.where(mask, form_gradient(grad, bounded, form, OUT, FORM), 0.0)
        at_label += tl.sum(tl.where(is_label, grad, 0.0), axis=1)
        if BIAS:
            sums = tl.sum(grad, axis=0)[None, :]
            tl.store(bias_ptr + band.to(tl.int64) * cols + c, sums, mask=c < cols)
        grad = tl.where(is_label, 0.0, grad)
        exact += tl.sum(grad, axis=1)
        q = cast_bounded(grad, payload_scale, True, True)
        # Triton would compute q once per layout. It deems a remainder too dear for that, and LLVM
        # drops this one.
        q = (q.to(tl.uint64) % 256).to(tl.uint8)
        values = (q.to(tl.uint16) << 8).to(tl.float16, bitcast=True)  # E5M2 is half of float16
        cast += tl.sum(values.to(tl.float32), axis=1)
        if ROW:
            places = tl.max_contiguous(q_ptr + first + (tile_r * width + tile_c), (1, LINE))
            tl.store(places, q, mask=inside & (c < width))
        if COL:
            places = qt_ptr + first.to(tl.int64) * length + (tile_c * length + tile_r)
            left = (length - first_row).to(tl.int32)
            tl.store(places, q, mask=(tile_r < left) & (c < cols))
    places = sum_ptr + part.to(tl.int64) * rows + first_row + r
    step = tl.num_programs(1).to(tl.int64) * rows
    tl.store(places, exact, mask=r < rows_left)
    tl.store(places + step, cast * payload_scale, mask=r < rows_left)
    tl.store(places + 2 * step, at_label, mask=r < rows_left)
