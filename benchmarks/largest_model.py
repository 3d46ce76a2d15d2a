"""The largest model that a cluster can train, and FP8-LM's published memory beside the planner's.

    python -m benchmarks.largest_model              # benchmarks/results/largest_model.csv, .png
    python -m benchmarks.largest_model --published  # benchmarks/results/published_memory.csv

* ``largest_model``: FP8-LM's Figure 1 (arXiv 2310.18313): GPTs of n layers, n heads and 128 n
  features on 8, 32 and 128 GPUs of 80 GB, all of which shard by FSDP2, sequences of 2,048, one at a
  time, with activation checkpointing: see `torch_fp8.planner.figure`.
* ``published_memory``: GPT-7B, 13B and 175B as FP8-LM trained them, without activation
  checkpointing. Megatron's distributed optimizer (ZeRO-1) shards the states alone, which this
  package does not do: the prediction takes the planner's activations and adds the standing bytes of
  that scheme, 2 for a weight and 4 for its float32 gradient on every GPU, 12 over the replicas. The
  plan of the same run under FSDP2 stands beside it.

Nothing runs on a GPU: bytes are counted on the meta device.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.measurement import RESULTS, Table, environment, print_table, read_rows
from torch_fp8.planner.figure import METHODS, Largest, draw, figure
from torch_fp8.planner.plan import plan

COLUMNS = ("gpus", "method", "layers", "billion_parameters", "peak_gib")
PUBLISHED_COLUMNS = (
    *("model", "gpus", "tensor", "pipeline", "micro_batch", "published_bf16_gb"),
    *("predicted_bf16_gb", "fsdp_bf16_gb", "published_fp8_lm_gb", "fsdp_o3_gb"),
)
# (model, GPUs, tensor, pipeline, micro-batch, BF16 GB, FP8-LM GB): FP8-LM's table of throughput
# and memory, second version; degrees of the scripts in Azure/MS-AMP-Examples, gpt3.
PUBLISHED = (
    ("gpt-7b", 32, 1, 1, 2, 69.6, 49.4),
    ("gpt-13b", 32, 2, 1, 2, 68.2, 48.9),
    ("gpt-175b", 128, 8, 4, 1, 66.1, 40.3),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--published", action="store_true", help="FP8-LM's memory instead")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    about = environment(torch.device("cpu"))
    if arguments.published:
        path = arguments.folder / "published_memory.csv"
        table = Table(path, PUBLISHED_COLUMNS, ("model",), about)
        for case in PUBLISHED:
            table.add([published_row(*case)])
        print_table(PUBLISHED_COLUMNS, table.rows)
        return
    path = arguments.folder / "largest_model.csv"
    table = Table(path, COLUMNS, ("gpus", "method"), about)
    for gpus in arguments.gpus:
        rows = figure((gpus,), arguments.methods, progress=print)
        table.add(
            [
                {
                    "gpus": row.gpus,
                    "method": row.method,
                    "layers": row.layers,
                    "billion_parameters": round(row.parameters / 1e9, 2),
                    "peak_gib": round(row.peak / 2**30, 2),
                }
                for row in rows
            ]
        )
    draw(drawn(read_rows(path)), path.with_suffix(".png"))
    print_table(COLUMNS, table.rows)


def drawn(rows: list[dict[str, str]]) -> list[Largest]:
    """Return the rows of the CSV in the figure's order."""
    ordered = sorted(rows, key=lambda row: (int(row["gpus"]), METHODS.index(row["method"])))
    return [
        Largest(
            int(row["gpus"]),
            row["method"],
            int(row["layers"]),
            int(float(row["billion_parameters"]) * 1e9),
            int(float(row["peak_gib"]) * 2**30),
        )
        for row in ordered
    ]


def published_row(
    model: str, gpus: int, tensor: int, pipeline: int, micro_batch: int, bf16: float, fp8_lm: float
) -> dict[str, Any]:
    """Return the published and the predicted gigabytes of a run."""
    options = {
        "gpus": gpus,
        "tensor": tensor,
        "pipeline": pipeline,
        "micro_batch": micro_batch,
        "sequence": 2048,
        "levels": ("bf16-mixed", "O3"),
    }
    sharded = plan(model, **options)
    replicas = gpus // (tensor * pipeline)
    alone = plan(model, **{**options, "gpus": tensor * pipeline, "levels": ("bf16-mixed",)})
    needed = alone.levels["bf16-mixed"]
    elements = needed.bytes["weights"] / 4
    # BF16 weights need no casts for autocast, which the planner's activations hold for all linears
    activations = needed.bytes["activations"] - 2 * elements
    zero_1 = elements * (2 + 4 + 12 / replicas) + activations
    return {
        "model": model,
        "gpus": gpus,
        "tensor": tensor,
        "pipeline": pipeline,
        "micro_batch": micro_batch,
        "published_bf16_gb": bf16,
        "predicted_bf16_gb": round(zero_1 / 1e9, 1),
        "fsdp_bf16_gb": round(sharded.levels["bf16-mixed"].peak / 1e9, 1),
        "published_fp8_lm_gb": fp8_lm,
        "fsdp_o3_gb": round(sharded.levels["O3"].peak / 1e9, 1),
    }


if __name__ == "__main__":
    main()
