"""Where the groups of 32 of a matrix (R, K) lie: kernels work on tiles of whole groups, (G, 32).

Groups are counted over the rows, so that a tile may span several. Positions are relative to the
element where a program's first group starts, or its row: 64 bits once, 32 for each element.

Layouts of a class of matrices, as launches find them:

* ``"flat"``: K a multiple of 32, rows not cut, addresses multiples of 16: groups follow each other.
* ``"rows"``: K a multiple of 16, addresses too: what is loaded at once stays within a row.
* ``"any"``: element by element.
"""

import triton
import triton.language as tl


@triton.jit
def at_origin(pointer, first, cols, LAYOUT: tl.constexpr, WIDTH: tl.constexpr = 32):
    """`pointer` to a matrix, moved to where the positions of a program with group `first` begin.

    What the compiler is told of it holds for a result of this function, not for an argument: on
    those it would be lost when the function is inlined.
    """
    if LAYOUT == "flat":
        pointer = tl.multiple_of(pointer + first.to(tl.int64) * WIDTH, 16)
    else:
        pointer = pointer + (first // tl.cdiv(cols, WIDTH)).to(tl.int64) * cols
        if LAYOUT == "rows":
            pointer = tl.multiple_of(pointer, WIDTH // 2)
    return pointer


@triton.jit
def places(first, local, num_groups, cols, LAYOUT: tl.constexpr, WIDTH: tl.constexpr = 32):
    """Where the groups `first + local` lie.

    Args:
        local: (G,) int32.
        cols: columns of the matrix as stored, WIDTH to a group: 32, or 16 where two share a byte.
    Returns:
        positions (G, WIDTH) after `at_origin`, mask that broadcasts to them, row (G,) and column
        (G, WIDTH) in the matrix. Of "flat" ones, row is 0 and column the position in the whole.
    """
    group = first + local
    inside = (group < num_groups)[:, None]
    lane = tl.arange(0, WIDTH)[None, :]
    if LAYOUT == "flat":
        position, row = local[:, None] * WIDTH + lane, group * 0
        mask, col = inside, (group * WIDTH)[:, None] + lane
    else:
        if LAYOUT == "rows":
            cols = cols // (WIDTH // 2) * (WIDTH // 2)  # tells the compiler what it is
        groups_per_row = tl.cdiv(cols, WIDTH)
        row = group // groups_per_row
        col = ((group - row * groups_per_row) * WIDTH)[:, None] + lane
        position = ((row - first // groups_per_row) * cols)[:, None] + col
        mask = inside & (col < cols)
    return position, mask, row, col
