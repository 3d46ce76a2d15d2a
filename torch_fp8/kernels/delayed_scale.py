"""Delayed scaling within a kernel that casts: reading the history, and finding the last program.

The scale comes from the amaxes of the past, so that a program casts its tile at once. When it is
done it counts itself in; nobody waits. The last one knows the amax of all. Where the history is
empty the scale is that of the tensor at hand, which only the last program knows: it then casts all
of it, alone. That takes milliseconds, once in a training run, for a history is empty until
something other than zeros was seen, and zeros need no scale: each program casts those itself.
"""

import triton
import triton.language as tl

from torch_fp8.kernels.fp8_cast import abs_bits, scale_from_amax


@triton.jit
def past_amax(history_ptr, length, MOST_RECENT: tl.constexpr):
    """Return the bits of the history's maximum or newest entry; 0 if the history is empty."""
    if MOST_RECENT:
        bits = abs_bits(tl.load(history_ptr))
    else:
        CHUNK: tl.constexpr = 1024  # Transformer Engine's length, and our default
        largest = tl.zeros((CHUNK,), dtype=tl.int32)
        for start in range(0, length, CHUNK):
            i = start + tl.arange(0, CHUNK)
            amax = tl.load(history_ptr + i, mask=i < length, other=0.0)
            largest = tl.maximum(largest, abs_bits(amax))
        bits = tl.max(largest, axis=0)
    return bits


@triton.jit
def record_amax(history_ptr, length, bits, past, MOST_RECENT: tl.constexpr):
    """Shift the history by one and put the amax in front; a non-finite amax repeats the newest
    entry.

    With ``max`` also if it is the first to be so many times as large as `past`, negative then.
    """
    INF_BITS: tl.constexpr = 0x7F800000
    OUTLIER: tl.constexpr = 4096.0
    latest = tl.load(history_ptr)
    amax = bits.to(tl.float32, bitcast=True)
    newest = tl.where(bits < INF_BITS, amax, latest)
    if not MOST_RECENT:
        outlier = (past != 0) & (bits < INF_BITS)
        outlier = outlier & (amax > past.to(tl.float32, bitcast=True) * OUTLIER)
        unmarked = latest.to(tl.int32, bitcast=True) >= 0
        newest = tl.where(outlier & unmarked, -latest, newest)
    CHUNK: tl.constexpr = 1024
    chunks = tl.cdiv(length, CHUNK)
    for chunk in range(0, chunks):
        i = (chunks - 1 - chunk) * CHUNK + tl.arange(0, CHUNK)
        older = tl.load(history_ptr + i - 1, mask=(i > 0) & (i < length), other=0.0)
        tl.debug_barrier()  # all of the chunk is read before any of it is written
        tl.store(history_ptr + i, tl.where(i == 0, newest, older), mask=i < length)


@triton.jit
def delayed_scale(bits, headroom, E5M2: tl.constexpr):
    """Compute the scale from the history's amax, or from the amax at hand if there is no history
    yet.
    """
    FMAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    return scale_from_amax(bits, FMAX, False) * headroom


@triton.jit
def count_in(progress_ptr, largest, programs):
    """Return whether this program is the last of `programs`, and then the largest bits of them all.

    progress: the largest bits so far, programs that are done; both 0 between launches, which the
    last one sees to. They are integers in a tensor of floats, that of the history.
    """
    progress_ptr = progress_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(progress_ptr, largest, sem="relaxed")
    tl.debug_barrier()  # all threads have read the history and written their bytes
    is_last = tl.atomic_add(progress_ptr + 1, 1, sem="acq_rel") == programs - 1
    if is_last:
        largest = tl.atomic_xchg(progress_ptr, 0, sem="relaxed")
        tl.store(progress_ptr + 1, 0)
    return is_last, largest
