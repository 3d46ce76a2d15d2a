"""Positions of the groups of 32 of a matrix (R, K): kernels work on tiles of whole groups, (G, 32).

Groups are counted over the rows, so that a tile may span several. Positions are relative to the
element where a program's first group starts, or its row: 64 bits once, 32 for each element.

Layouts of a class of matrices, as launches find them:

* ``"flat"``: K a multiple of 32, rows not cut, addresses multiples of 16: groups follow each other.
* ``"rows"``: K a multiple of 16, addresses too: what is loaded at once stays within a row.
* ``"any"``: element by element.
* ``"squares"``: as "flat", but counted over squares of 128 x 128 elements, 512 groups each, down a
  square's columns of groups: 16 groups that follow each other are 16 rows, and their transpose 32
  runs of 16 elements. Squares beyond the last row or column count in full.
"""

import triton
import triton.language as tl


@triton.jit
def at_origin(pointer, first, cols, LAYOUT: tl.constexpr, WIDTH: tl.constexpr = 32):
    """Move `pointer`, to a matrix, to the origin of a program that starts with group `first`.

    What the compiler is told of it holds for a result of this function, not for an argument: on
    those it would be lost when the function is inlined.
    """
    if LAYOUT == "flat":
        pointer = tl.multiple_of(pointer + first.to(tl.int64) * WIDTH, 16)
    elif LAYOUT == "squares":
        square_row, square_col = square(first, tl.cdiv(cols, WIDTH))
        pointer += square_row.to(tl.int64) * 128 * cols + square_col * (4 * WIDTH)
        pointer = tl.multiple_of(pointer, 16)
    else:
        pointer = pointer + (first // tl.cdiv(cols, WIDTH)).to(tl.int64) * cols
        if LAYOUT == "rows":
            pointer = tl.multiple_of(pointer, WIDTH // 2)
    return pointer


@triton.jit
def square(first, groups_per_row):
    """Return row and column, counted in squares, of the square that starts with group `first`."""
    squares_per_row = tl.cdiv(groups_per_row, 4)
    index = first // 512
    return index // squares_per_row, index % squares_per_row


@triton.jit
def places(first, local, num_groups, cols, LAYOUT: tl.constexpr, WIDTH: tl.constexpr = 32, rows=0):
    """Return the positions of the groups `first + local`.

    Args:
        local: (G,) int32.
        cols: columns of the matrix as stored, WIDTH to a group: 32, or 16 where two share a byte.
        rows: the number of rows of the matrix; wanted for squares.
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
    elif LAYOUT == "squares":
        cols = cols // WIDTH * WIDTH
        square_row, square_col = square(first, cols // WIDTH)
        within_row, within_col = local % 128, (local // 128 * WIDTH)[:, None] + lane
        row, col = square_row * 128 + within_row, square_col * (4 * WIDTH) + within_col
        position = (within_row * cols)[:, None] + within_col
        mask = (row < rows)[:, None] & (col < cols)
    else:
        if LAYOUT == "rows":
            cols = cols // (WIDTH // 2) * (WIDTH // 2)  # tells the compiler what it is
        groups_per_row = tl.cdiv(cols, WIDTH)
        row = group // groups_per_row
        col = ((group - row * groups_per_row) * WIDTH)[:, None] + lane
        position = ((row - first // groups_per_row) * cols)[:, None] + col
        mask = inside & (col < cols)
    return position, mask, row, col


@triton.jit
def scales_at_origin(pointer, first, cols, LAYOUT: tl.constexpr):
    """Move `pointer`, to a matrix's scales (one for each group), as `at_origin` does."""
    if LAYOUT == "squares":
        groups_per_row = tl.cdiv(cols, 32)
        square_row, square_col = square(first, groups_per_row)
        return pointer + square_row.to(tl.int64) * 128 * groups_per_row + square_col * 4
    return pointer + first


@triton.jit
def scale_places(first, local, num_groups, cols, LAYOUT: tl.constexpr, rows=0):
    """Return positions (G,) of the scales of groups `first + local` after `scales_at_origin`, and
    mask.
    """
    if LAYOUT == "squares":
        groups_per_row = tl.cdiv(cols, 32)
        square_row, square_col = square(first, groups_per_row)
        row, group = local % 128, local // 128
        inside = (square_row * 128 + row < rows) & (square_col * 4 + group < groups_per_row)
        return row * groups_per_row + group, inside
    return local, first + local < num_groups
