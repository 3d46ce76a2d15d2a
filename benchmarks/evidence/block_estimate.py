"""Estimate the time of a compiled 8B block on an H200 from today's counts.

    python -m benchmarks.evidence.block_estimate    # runs/benchmarks/block_estimate.csv

The rates are those of the compiled blocks that an H200 has run at 8,192 tokens, with opaque calls
(`block_kernels.csv`): products, attention, and the bytes per second of everything else. The bytes
are those of today's generated code (`compiled_block.csv`). So

* ``gpu_ms`` = products + attention + bytes / rate. Products take as many tokens per second as at
  8,192 tokens, or the time to move their weights, if that is longer. Sequences have 4,096 tokens,
  or all tokens if there are fewer. All bytes except those of weights grow with the tokens;
* ``host_ms`` is extrapolated from BF16's and torchao's host times on the H200 and in
  `host_time.csv`, and does not depend on the tokens;
* ``ms`` is the larger of the two, and ``replayed_ms`` is ``gpu_ms``: a CUDA graph
  (``mode="reduce-overhead"``) has no host to wait for;
* ``speedup`` and ``replayed_speedup``: over compiled BF16.
"""

import argparse
from typing import Any, NamedTuple

from benchmarks.measurement import command_line, print_table
from benchmarks.rows import RESULTS, add_csv, read_rows, write_rows
from benchmarks.shapes import LLAMA_3_1_8B

BF16, TORCHAO = "BF16", "torchao tensorwise"
WEIGHTS = {
    "tensorwise": (8, 8),
    "delayed": (6, 6),
    "tensorwise last_step O2 with payloads": (3, 2),
}
"""The bytes that casts and transposes move per element of the weights of layers that share their
backward (q, k and v; gate and up), and of the others, by variant. Casts in forward and in backward
read 2 and write 1, and an amax reads 2. A payload from the optimizer's step is transposed in
backward, but weights that share a backward have one scale there and are cast again.
"""
TOKENS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 16384, 32768)
MEASURED, SEQUENCE = 8192, 4096
OPAQUE = 8.0e9
"""The bytes of a block whose operators were opaque calls, as the H200 ran it."""
COPY = 4.2e12
"""Bytes per second of a copy on the H200 (`roofline.csv` and the rates of `benchmarks.card`)."""
ON_CARD = {BF16: "bf16", TORCHAO: TORCHAO}
"""The names in `block.csv` of the variants that have run there as they are today."""
_HIDDEN, _INNER = LLAMA_3_1_8B["hidden_size"], LLAMA_3_1_8B["intermediate_size"]
_GROUPS = LLAMA_3_1_8B["num_key_value_heads"] * LLAMA_3_1_8B["head_dim"]
ELEMENTS = _HIDDEN * (_HIDDEN + 2 * _GROUPS + 2 * _INNER), _HIDDEN * (_HIDDEN + _INNER)
"""The elements of the weights of layers that share their backward, and of the others."""
COLUMNS = (
    *("tokens", "variant", "gpu_ms", "host_ms", "ms", "replayed_ms"),
    *("speedup", "replayed_speedup", "command"),
)


class Rates(NamedTuple):
    """What a compiled block of the H200 took at `MEASURED` tokens.

    Attributes:
        products, attention: milliseconds.
        bandwidth: bytes per second of all other kernels.
    """

    products: float
    attention: float
    bandwidth: float


def _rows(name: str, **wanted: str) -> list[dict[str, Any]]:
    rows = read_rows(RESULTS / f"{name}.csv")
    return [row for row in rows if all(row[column] == value for column, value in wanted.items())]


def rates(variant: str, counted: float) -> Rates:
    """Return the rates of a variant in `block_kernels.csv`, which moved `counted` bytes."""
    kernels = _rows("block_kernels", variant=variant, mode="compiled")
    times = {row["kernel"]: float(row["ms"]) for row in kernels}
    every = times.pop("all")
    products = sum(ms for name, ms in times.items() if name.startswith("nvjet"))
    attention = sum(ms for name, ms in times.items() if "cudnn" in name)
    return Rates(products, attention, counted / (every - products - attention) * 1e3)


def gpu_ms(tokens: int, rate: Rates, moved: float, constant: float, itemsize: int) -> float:
    """Return the milliseconds of a block on the H200.

    Args:
        tokens: number of tokens.
        rate: rates at `MEASURED` tokens.
        moved: bytes besides products and attention at `MEASURED` tokens.
        constant: those of them that do not depend on the tokens.
        itemsize: bytes of an element of the products' operands; gradients have two.
    """
    share = tokens / MEASURED
    products = max(rate.products * share, (2 * itemsize + 2) * sum(ELEMENTS) / COPY * 1e3)
    attention = rate.attention * share * min(tokens, SEQUENCE) / SEQUENCE
    return products + attention + (constant + (moved - constant) * share) / rate.bandwidth * 1e3


def host_ms() -> dict[str, float]:
    """Return the milliseconds of the H200's host by variant of `host_time.csv`."""
    counted = {
        row["recipe"]: float(row["host_us"])
        for row in _rows("host_time", what="training, compiled", mode="compiled")
    }
    card = {
        name: float(_rows("block", variant=variant, mode="compiled", batch="2")[0]["host_ms"])
        for name, variant in ON_CARD.items()
    }
    slope = (card[TORCHAO] - card[BF16]) / (counted[TORCHAO] - counted[BF16])
    return {name: card[BF16] + slope * (us - counted[BF16]) for name, us in counted.items()}


def estimate() -> list[dict[str, Any]]:
    """Return the rows of all numbers of tokens and variants."""
    moved = {r["variant"]: float(r["gb"]) * 1e9 for r in _rows("compiled_block", block="8B")}
    bf16, ours = rates("bf16", moved[BF16]), rates("default", OPAQUE)
    hosts, rows = host_ms(), []
    for tokens in TOKENS:
        reference: dict[str, float] = {}
        for name, of_weights in ({BF16: (0, 0)} | WEIGHTS).items():
            constant = sum(n * moves for n, moves in zip(ELEMENTS, of_weights, strict=True))
            rate, itemsize = (bf16, 2) if name == BF16 else (ours, 1)
            gpu = gpu_ms(tokens, rate, moved[name], constant, itemsize)
            times = {"ms": max(gpu, hosts[name]), "replayed_ms": gpu}
            reference = reference or times
            row = {"tokens": tokens, "variant": name, "gpu_ms": gpu, "host_ms": hosts[name]}
            row |= times | {
                "speedup": reference["ms"] / times["ms"],
                "replayed_speedup": reference["replayed_ms"] / times["replayed_ms"],
            }
            figures = {c: f"{x:.2f}" if isinstance(x, float) else x for c, x in row.items()}
            rows.append(figures | {"command": command_line()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "block_estimate")
    options = parser.parse_args()
    rows = estimate()
    write_rows(options.csv, COLUMNS, rows)
    print_table(COLUMNS[:8], rows)


if __name__ == "__main__":
    main()
