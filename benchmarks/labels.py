"""Names of the CSV files' columns and values in pictures."""

from typing import Any

AXES = {
    "M": "tokens (rows M of the input)",
    "ceiling": "speed-up over BF16 at best",
    "contracted": "contraction dimension K",
    "error": "relative error of the result",
    "loss": "training loss",
    "step": "steps of 8,192 tokens",
    "held_bytes_per_token": "memory kept for backward (bytes per token)",
    "host_ms": "host time (ms)",
    "median_ms": "time (ms)",
    "peak_mib": "peak memory (GiB)",
    "saved_bytes_per_token": "saved for backward (bytes per token)",
    "speedup": "speed-up over BF16",
    "tflops": "TFLOP/s",
    "tokens_per_s": "tokens per second",
}
"""Column -> label of an axis, with its unit."""

VALUES = {
    "bf16": "BF16",
    "bf16-mixed": "BF16",
    "bf16-true": "BF16 weights and states",
    "fp8-mixed": "FP8",
    "O1": "FP8, level O1",
    "O2": "FP8, level O2",
    "O3": "FP8, level O3",
    "O3, release": "FP8, level O3, gradient release",
    "fused": "producers write FP8, weights cached",
    "states": "optimizer states",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
}
"""Value of a column -> how it reads; others stay, with `fp8-mixed` and `bf16` written out."""


def label(row: dict[str, Any], columns: tuple[str, ...]) -> str:
    """Name a row by the values of some columns.

    Args:
        row: row of a CSV.
        columns: columns that distinguish rows, in order.
    """
    return ", ".join(word for word in (_word(c, row.get(c) or "") for c in columns) if word)


def words(value: str) -> str:
    """Return how a value reads."""
    if value in VALUES:
        return VALUES[value]
    return value.replace("fp8-mixed", "FP8").replace("bf16", "BF16")


def _word(column: str, value: str) -> str:
    if column == "batch":
        return f"{value} sequence{'' if value == '1' else 's'}" if value else ""
    if column == "checkpointing":
        return "checkpointed" if value == "True" else ""
    return words(value)
