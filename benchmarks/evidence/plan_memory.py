"""Peak memory by model, GPUs and level: ``plan_memory.csv`` and the table of docs/choose.md.

    python -m benchmarks.evidence.plan_memory            # runs/benchmarks/plan_memory.csv
    python -m benchmarks.evidence.plan_memory --docs     # writes the committed rows into the page

Counted on the meta device by `torch_fp8_tools.plan`: FSDP2 over all GPUs, one sequence of 4,096
tokens on each, activation checkpointing, AdamW.
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.rows import RESULTS, add_csv, read_rows, write_rows
from torch_fp8_tools.plan.plan import plan
from torch_fp8_tools.plan.setup import LEVELS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "choose.md"
MARK = "<!-- table: python -m benchmarks.evidence.plan_memory --docs -->"
FILE = "plan_memory.csv"
COLUMNS = ("model", "billion_parameters", "gpus", "level", "peak_gib", "fits_80_gib")
RUNS = (
    ("llama-3.2-1b", 1),
    ("llama-3.2-3b", 1),
    ("llama-3.1-8b", 1),
    ("llama-3.1-8b", 8),
    ("qwen3-14b", 8),
    ("llama-3.1-70b", 64),
    *((name, 8) for name in ("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "mixtral-8x7b")),
)
"""Presets of the planner, and the number of GPUs."""


def rows_of(model: str, gpus: int) -> list[dict[str, object]]:
    """Return one row for each level of a model on some H100s."""
    planned = plan(model, gpus=gpus, card="h100", checkpointing=True, levels=LEVELS)
    billion = round(planned.num_params / 1e9, 2)
    return [
        {
            "model": model,
            "billion_parameters": billion,
            "gpus": gpus,
            "level": name,
            "peak_gib": round(level.peak / 2**30, 2),
            "fits_80_gib": level.fits,
        }
        for name, level in planned.levels.items()
    ]


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """Return the table of the page: a line for a model on some GPUs, a column for each level."""
    lines: dict[tuple[object, ...], dict[object, str]] = {}
    for row in rows:
        peak = f"{float(str(row['peak_gib'])):.1f}"
        text = peak if str(row["fits_80_gib"]) == "True" else f"({peak})"
        key = (row["model"], row["billion_parameters"], row["gpus"])
        lines.setdefault(key, {})[row["level"]] = text
    text = f"| model | 10^9 parameters | GPUs | {' | '.join(LEVELS)} |\n"
    text += "|---|---|---|" + "---|" * len(LEVELS) + "\n"
    for key, of_level in lines.items():
        cells = [*map(str, key), *(of_level[level] for level in LEVELS)]
        text += f"| {' | '.join(cells)} |\n"
    return text


def write_docs(path: Path = DOCS) -> None:
    """Put the committed rows into the page, between its two marks."""
    before, _, rest = path.read_text().partition(MARK)
    _, _, after = rest.partition(MARK)
    path.write_text(f"{before}{MARK}\n{table(read_rows(RESULTS / FILE))}{MARK}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", action="store_true", help="write the table into the page")
    parser.add_argument("--models", nargs="+", help="only these")
    add_csv(parser, "plan_memory")
    options = parser.parse_args()
    if options.docs:
        write_docs()
        return
    kept = {(r["model"], str(r["gpus"]), r["level"]): r for r in read_rows(options.csv)}
    for model, gpus in RUNS:
        if options.models and model not in options.models:
            continue
        for row in rows_of(model, gpus):
            kept[row["model"], str(row["gpus"]), row["level"]] = row
        write_rows(options.csv, COLUMNS, list(kept.values()))
        print(f"{model} on {gpus} GPUs counted", flush=True)


if __name__ == "__main__":
    main()
