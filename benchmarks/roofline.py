"""Estimated lower bounds of the time of a linear, a block and a step.

    python -m benchmarks.roofline       # runs/benchmarks/roofline.csv

A linear with input x (M, K), weight w (N, K) and gradient g (M, N) runs three GEMMs of 2 M N K
floating-point operations each. A GEMM takes the longer of its arithmetic and of its bytes (each
operand read once, the result written once); casts take the bytes that they read and write, at copy
bandwidth; launches are free. The ceiling is BF16's time over FP8's.

`TRAFFIC` has the bytes of the casts per element of x, w and g, for one forward and backward. With
BF16 at 2 bytes and FP8 at 1, an amax reads 2, and a cast reads 2 and writes 1 for each layout:

    tensorwise          x, g: amax, then both layouts of one read, 6; w: a layout in forward, the
                        other in backward, 3 each; its amax comes from the optimizer
    delayed, blockwise  x, g: both layouts of one read, 4 (and two float32 scales for 128 elements);
                        w: as above
    rowwise             amaxes along rows and along columns, 2 each, then 4
    weights cached      w: the transposed copy of the payload, 2
    fused               x, g: leave their producers in FP8 instead of BF16, 0; w: as above
    peers               by their sources: torchao's roofline_utils.py, Transformer Engine's
                        quantizer.cpp

Ours are as counted from the launches (benchmarks/results/quantization_bytes.csv).

Rates of cards are the data sheet's peaks times the usual shares (`SHARE_OF_FLOPS`,
`SHARE_OF_BANDWIDTH`), with twice the BF16 rate for FP8. Benchmarks use measured rates instead: see
benchmarks/card.py.
"""

import argparse
from dataclasses import dataclass

from benchmarks.measurement import command_line, print_table
from benchmarks.plot import draw
from benchmarks.rows import add_csv, write_rows
from benchmarks.shapes import LLAMA_3_1_8B_BLOCK, TOKENS

COLUMNS = (
    *("kind", "card", "linears", "M", "method", "x_bytes", "w_bytes", "g_bytes"),
    *("cast_mib", "gemm_ms", "cast_ms", "bf16_ms", "ceiling", "command"),
)


@dataclass(frozen=True)
class Rates:
    """The rates of a card: bytes per second of a copy (read and written), and FLOP per second."""

    bandwidth: float
    bf16: float
    fp8: float


# NVIDIA's data sheets, SXM: dense BF16 is half of the figure given with sparsity.
# https://www.nvidia.com/en-us/data-center/h100/  https://www.nvidia.com/en-us/data-center/h200/
PEAKS = {"H100": (3.35e12, 989.4e12), "H200": (4.8e12, 989.4e12)}
# What torchao finds reachable: torchao/testing/training/roofline_utils.py, H100 and B200.
SHARE_OF_FLOPS, SHARE_OF_BANDWIDTH = 0.78, 0.92
CARDS = {
    name: Rates(
        SHARE_OF_BANDWIDTH * bytes_per_s, SHARE_OF_FLOPS * flops, 2 * SHARE_OF_FLOPS * flops
    )
    for name, (bytes_per_s, flops) in PEAKS.items()
}


@dataclass(frozen=True)
class Traffic:
    """The bytes that casts read and write per element of x, w and g."""

    x: float
    w: float
    g: float


_SCALES = 2 * 4 / 128
TRAFFIC = {
    "tensorwise": Traffic(6, 6, 6),
    "tensorwise, amax from the producer": Traffic(4, 6, 4),
    "tensorwise, weights cached": Traffic(6, 2, 6),
    "delayed": Traffic(4, 6, 4),
    "rowwise": Traffic(8, 8, 8),
    "blockwise": Traffic(4 + _SCALES, 6, 4 + _SCALES),
    "blockwise, weights cached": Traffic(4 + _SCALES, 2, 4 + _SCALES),
    "mxfp8": Traffic(4 + 2 / 32, 6 + 2 / 32, 4 + 2 / 32),
    "fused": Traffic(0, 2, 0),
    "torchao tensorwise": Traffic(6, 8, 6),
    "torchao rowwise": Traffic(8, 10, 8),
    "torchao blockwise": Traffic(6, 6, 6),
    "Transformer Engine delayed": Traffic(4, 4, 4),
    "Transformer Engine current": Traffic(6, 6, 6),
    "Transformer Engine blockwise": Traffic(4 + _SCALES, 4, 4 + _SCALES),
}

# Inputs of the linears that read the same tensor, which is cast once for all of them.
SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def gemm_seconds(m: int, n: int, k: int, rates: Rates, *, fp8: bool) -> float:
    """Return the seconds of (m, k) times (k, n) into BF16."""
    arithmetic = 2 * m * n * k / (rates.fp8 if fp8 else rates.bf16)
    num_bytes = (1 if fp8 else 2) * (m * k + n * k) + 2 * m * n
    return max(arithmetic, num_bytes / rates.bandwidth)


def gemms_seconds(m: int, k: int, n: int, rates: Rates, *, fp8: bool) -> float:
    """Return the seconds of the three GEMMs of a linear: fprop, dgrad, wgrad."""
    shapes = ((m, n, k), (m, k, n), (n, k, m))
    return sum(gemm_seconds(*shape, rates, fp8=fp8) for shape in shapes)


def cast_bytes(m: int, k: int, n: int, traffic: Traffic) -> float:
    """Return the bytes that the casts of a linear read and write."""
    return traffic.x * m * k + traffic.w * n * k + traffic.g * m * n


def linear_seconds(m: int, k: int, n: int, rates: Rates, traffic: Traffic | None) -> float:
    """Return the seconds of a linear's forward and backward with casts, or without in BF16."""
    gemms = gemms_seconds(m, k, n, rates, fp8=traffic is not None)
    return gemms + (cast_bytes(m, k, n, traffic) / rates.bandwidth if traffic else 0.0)


def linears_seconds(
    m: int,
    linears: dict[str, tuple[int, int]],
    rates: Rates,
    traffic: Traffic | None,
    *,
    share_inputs: bool = False,
) -> float:
    """Return the seconds of forward and backward of several linears (K, N) on m rows."""
    total = sum(linear_seconds(m, k, n, rates, traffic) for k, n in linears.values())
    if traffic is not None and share_inputs:
        total -= traffic.x * _repeated_inputs(m, linears) / rates.bandwidth
    return total


def _repeated_inputs(m: int, linears: dict[str, tuple[int, int]]) -> int:
    """Return the number of elements of inputs that are another linear's, too."""
    repeated = 0
    for group in SHARED_INPUTS:
        repeated += sum(m * linears[name][0] for name in group[1:] if name in linears)
    return repeated


def fused_linears(linears: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Join linears that read the same tensor: Transformer Engine's and Megatron's layout."""
    fused = dict(linears)
    for group in SHARED_INPUTS:
        shapes = [fused.pop(name) for name in group if name in fused]
        if shapes:
            fused["+".join(group)] = (shapes[0][0], sum(n for _, n in shapes))
    return fused


def block_seconds(
    m: int, sequence: int, layout: dict[str, int], rates: Rates, traffic: Traffic | None
) -> float:
    """Return the seconds of a decoder layer on m tokens: linears, attention, and the rest.

    Causal attention takes 2 m S Q operations forward and 2.5 times as many backward (S tokens per
    sequence, Q features of all heads), in BF16. Norms, rotary embedding, SwiGLU, attention and the
    residual additions read and write each of their BF16 tensors once.
    """
    hidden, inner = layout["hidden_size"], layout["intermediate_size"]
    queries = layout["num_attention_heads"] * layout["head_dim"]
    keys = layout["num_key_value_heads"] * layout["head_dim"]
    linears = linears_seconds(m, block_linears(layout), rates, traffic, share_inputs=True)
    attention = 3.5 * 2 * m * min(sequence, m) * queries / rates.bf16
    forward = 2 * 2 * hidden + 2 * 3 * hidden + 4 * (queries + keys) + 3 * inner
    backward = 2 * 3 * hidden + 2 * 3 * hidden + 4 * (queries + keys) + 5 * inner
    return linears + attention + 2 * m * (forward + backward) / rates.bandwidth


def block_linears(layout: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return (K, N) of the linears of a decoder layer, from LlamaConfig's arguments."""
    hidden, inner = layout["hidden_size"], layout["intermediate_size"]
    queries = layout["num_attention_heads"] * layout["head_dim"]
    keys = layout["num_key_value_heads"] * layout["head_dim"]
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def step_seconds(
    m: int,
    sequence: int,
    layout: dict[str, int],
    rates: Rates,
    traffic: Traffic | None,
    optimizer_bytes: float,
) -> float:
    """Return the seconds of a training step: blocks, head in BF16, the optimizer's bytes.

    The loss reads the float32 logits once forward and, with their gradient written, once backward.

    Args:
        optimizer_bytes: bytes that its step reads and writes.
    """
    vocabulary = layout["vocab_size"]
    blocks = layout["num_hidden_layers"] * block_seconds(m, sequence, layout, rates, traffic)
    head = gemms_seconds(m, layout["hidden_size"], vocabulary, rates, fp8=False)
    loss = 3 * 4 * m * vocabulary / rates.bandwidth
    return blocks + head + loss + optimizer_bytes / rates.bandwidth


def rows() -> list[dict[str, object]]:
    """Return the ceilings of each method for the linears of a Llama-3.1-8B block."""
    return [
        _row(card, rates, m, shared, method, traffic)
        for card, rates in CARDS.items()
        for shared in (False, True)
        for m in sorted(TOKENS)
        for method, traffic in TRAFFIC.items()
    ]


def _row(
    card: str, rates: Rates, m: int, shared: bool, method: str, traffic: Traffic
) -> dict[str, object]:
    linears = LLAMA_3_1_8B_BLOCK
    bf16 = linears_seconds(m, linears, rates, None)
    gemms = sum(gemms_seconds(m, k, n, rates, fp8=True) for k, n in linears.values())
    total = linears_seconds(m, linears, rates, traffic, share_inputs=shared)
    return {
        "kind": "model",
        "card": card,
        "linears": "seven, inputs shared" if shared else "seven",
        "M": m,
        "method": method,
        "x_bytes": traffic.x,
        "w_bytes": traffic.w,
        "g_bytes": traffic.g,
        "cast_mib": round((total - gemms) * rates.bandwidth / 2**20, 1),
        "gemm_ms": round(gemms * 1e3, 3),
        "cast_ms": round((total - gemms) * 1e3, 3),
        "bf16_ms": round(bf16 * 1e3, 3),
        "ceiling": round(bf16 / total, 3),
        "command": command_line(),
    }


def main() -> None:
    """Write the CSV, its picture, and print the H200's ceilings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_csv(parser, "roofline")
    path, table = parser.parse_args().csv, rows()
    write_rows(path, COLUMNS, table)
    draw(path)
    shown = [r for r in table if (r["card"], r["linears"]) == ("H200", "seven, inputs shared")]
    print_table(("card", "linears", "M", "method", "cast_ms", "ceiling"), shown)


if __name__ == "__main__":
    main()
