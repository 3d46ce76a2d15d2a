"""Positions of groups of 32 elements in a matrix (R, K); kernels work on tiles of groups, (G, 32).

Groups are numbered row after row, so a tile can span several rows. Positions are relative to the
first element of the program's first group, or of its row: one 64-bit offset per program, then 32
bits per element.

The launcher picks one of these layouts for a class of matrices:

* ``"flat"``: K is a multiple of 32, rows are whole, and addresses are multiples of 16; groups are
  adjacent in memory.
* ``"rows"``: K and addresses are multiples of 16; a 16-byte access stays within a row.
* ``"any"``: elements move one by one.
* ``"squares"``: as "flat", but groups are numbered within squares of 128 x 128 elements, 512 groups
  each, down the square's 4 columns of groups. 16 consecutive groups are 16 rows, and their
  transpose is 32 runs of 16 elements. Squares cut by the last row or column count 512, too.
"""

import triton
import triton.language as tl


@triton.jit
def at_origin(pointer, first, cols, LAYOUT: tl.constexpr):
    """Move `pointer` from the start of a matrix to the origin of a program starting at `first`.

    The alignment hints are on the result, because Triton drops hints on arguments when it inlines
    the function.
    """
    if LAYOUT == "flat":
        pointer = tl.multiple_of(pointer + first.to(tl.int64) * 32, 16)
    elif LAYOUT == "squares":
        square_row, square_col = square(first, tl.cdiv(cols, 32))
        pointer += square_row.to(tl.int64) * 128 * cols + square_col * 128
        pointer = tl.multiple_of(pointer, 16)
    else:
        pointer = pointer + (first // tl.cdiv(cols, 32)).to(tl.int64) * cols
        if LAYOUT == "rows":
            pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def square(first, groups_per_row):
    """Return the row and column, in squares, of the square that starts with group `first`."""
    squares_per_row = tl.cdiv(groups_per_row, 4)
    index = first // 512
    return index // squares_per_row, index % squares_per_row


@triton.jit
def places(first, local, num_groups, cols, LAYOUT: tl.constexpr, rows=0):
    """Return the positions of the groups `first + local`.

    Args:
        local: (G,) int32.
        cols: columns of the matrix.
        rows: number of rows of the matrix; needed for "squares" only.
    Returns:
        position (G, 32) relative to `at_origin`, a mask that broadcasts to it, and the row (G,)
        and column (G, 32) in the matrix. If "flat", row is 0 and column the index in the whole.
    """
    group = first + local
    inside = (group < num_groups)[:, None]
    lane = tl.arange(0, 32)[None, :]
    if LAYOUT == "flat":
        position, row = local[:, None] * 32 + lane, group * 0
        mask, col = inside, (group * 32)[:, None] + lane
    elif LAYOUT == "squares":
        cols = cols // 32 * 32
        square_row, square_col = square(first, cols // 32)
        within_row, within_col = local % 128, (local // 128 * 32)[:, None] + lane
        row, col = square_row * 128 + within_row, square_col * 128 + within_col
        position = (within_row * cols)[:, None] + within_col
        mask = (row < rows)[:, None] & (col < cols)
    else:
        if LAYOUT == "rows":
            cols = cols // (16) * (16)  # the compiler learns the divisibility
        groups_per_row = tl.cdiv(cols, 32)
        row = group // groups_per_row
        col = ((group - row * groups_per_row) * 32)[:, None] + lane
        position = ((row - first // groups_per_row) * cols)[:, None] + col
        mask = inside & (col < cols)
    return position, mask, row, col


@triton.jit
def scales_at_origin(pointer, first, cols, LAYOUT: tl.constexpr):
    """Move `pointer` to a matrix's scales, one per group, as `at_origin` does for elements."""
    if LAYOUT == "squares":
        groups_per_row = tl.cdiv(cols, 32)
        square_row, square_col = square(first, groups_per_row)
        return pointer + square_row.to(tl.int64) * 128 * groups_per_row + square_col * 4
    return pointer + first


@triton.jit
def scale_places(first, local, num_groups, cols, LAYOUT: tl.constexpr, rows=0):
    """Return the positions (G,) of the scales of groups `first + local`, relative to
    `scales_at_origin`, and a mask (G,).
    """
    if LAYOUT == "squares":
        groups_per_row = tl.cdiv(cols, 32)
        square_row, square_col = square(first, groups_per_row)
        row, group = local % 128, local // 128
        inside = (square_row * 128 + row < rows) & (square_col * 4 + group < groups_per_row)
        return row * groups_per_row + group, inside
    return local, first + local < num_groups
