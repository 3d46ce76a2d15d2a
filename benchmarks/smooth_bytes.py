"""Bytes that Smooth-SwiGLU adds to a Llama block's training step, counted kernel by kernel.

    python -m benchmarks.smooth_bytes       # from the root; minutes

The block of `benchmarks.block_bytes` runs with Smooth-SwiGLU and without; a kernel's row has the
bytes that all its launches read and write. Of torch's operators, which are not counted there, there
is one more: the gradient of down's weight is divided by the factors, 4 bytes for each element; its
row is written by hand.
"""

import argparse
from collections import Counter

from benchmarks import block_bytes  # before torch_fp8

# isort: split
from benchmarks.measurement import print_table
from benchmarks.rows import add_csv, write_rows

COLUMNS = ("recipe", "kernel", "launches", "launches_smooth", "bytes", "bytes_smooth")
RECIPES = ("tensorwise", "delayed")
block_bytes.TOKENS = 128  # a tile's rows: the interpreter takes minutes for 512


def rows(recipe: str) -> list[dict[str, object]]:
    """Return a row for each kernel whose bytes or launches differ, and one for their sum."""
    launches, moved = [], []
    for smooth in (False, True):
        found = [k for k in block_bytes.count(recipe, smooth) if k.kind == "kernel"]
        launches.append(Counter(k.name for k in found))
        total: Counter[str] = Counter()
        for launch in found:
            total[launch.name] += launch.moved
        moved.append(total)
    division = "division of the gradient"
    launches[1][division] = 1
    moved[1][division] = 4 * block_bytes.HIDDEN * block_bytes.INNER
    names = [n for n in launches[0] | launches[1] if moved[0][n] != moved[1][n]]
    made = [(n, launches[0][n], launches[1][n], moved[0][n], moved[1][n]) for n in sorted(names)]
    made.append(("all", *(c.total() for c in launches), *(c.total() for c in moved)))
    return [dict(zip(COLUMNS, (recipe, *values), strict=True)) for values in made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "smooth_bytes")
    path = parser.parse_args().csv
    made = [row for recipe in RECIPES for row in rows(recipe)]
    write_rows(path, COLUMNS, made)
    print_table(COLUMNS, made)


if __name__ == "__main__":
    main()
