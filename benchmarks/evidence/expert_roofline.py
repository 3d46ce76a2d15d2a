"""Experts in FP8 against BF16 on paper: ``expert_roofline.csv``, and the table of docs/moe.md.

    python -m benchmarks.evidence.expert_roofline            # runs/benchmarks/expert_roofline.csv
    python -m benchmarks.evidence.expert_roofline --docs     # writes the committed rows to the page

The seconds are those of `torch_fp8_tools.plan.experts` for one H100: the GEMMs of a block's
experts, with their casts, gathers and transpositions, forward and backward. No card has measured
them. A frozen base, below adapters, has no weight gradient and casts no weight.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS, add_csv, read_rows, write_rows
from torch_fp8_tools.plan.experts import expert_weights_of, rows_per_expert, speedup
from torch_fp8_tools.plan.layouts import EXPERTS, build, period
from torch_fp8_tools.plan.setup import make_setup

DOCS = Path(__file__).resolve().parents[2] / "docs" / "moe.md"
MARK = "<!-- table: python -m benchmarks.evidence.expert_roofline --docs -->"
FILE = "expert_roofline.csv"
COLUMNS = ("model", "tokens", "rows_per_expert", "trained", "frozen")
TOKENS = (2048, 8192, 32768)


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each model and number of tokens of a micro-batch."""
    for name in EXPERTS:
        setup = make_setup(name, sequence=2048)
        weights = expert_weights_of(
            build(setup.config, num_layers=period(setup.config)), setup.config
        )
        frozen = [dataclasses.replace(weight, frozen=True) for weight in weights]
        for tokens in TOKENS:
            setup = make_setup(name, sequence=2048, micro_batch=tokens // 2048)
            yield {
                "model": name,
                "tokens": tokens,
                "rows_per_expert": round(rows_per_expert(setup, weights[0])),
                "trained": f"{speedup(setup, weights, trained=True):.2f}",
                "frozen": f"{speedup(setup, frozen, trained=True):.2f}",
            }


def table() -> str:
    """Return the table of the page, of the committed rows."""
    lines = ["| model | tokens | rows an expert | trained | frozen |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row[c] for c in COLUMNS)} |" for row in read_rows(RESULTS / FILE)]
    return "\n".join(lines) + "\n"


def write_docs() -> None:
    """Put the committed rows into the page, between its two marks."""
    before, _, rest = DOCS.read_text().partition(MARK)
    _, _, after = rest.partition(MARK)
    DOCS.write_text(f"{before}{MARK}\n{table()}{MARK}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", action="store_true", help="write the table into the page")
    add_csv(parser, "expert_roofline")
    options = parser.parse_args()
    if options.docs:
        write_docs()
    else:
        write_rows(options.csv, COLUMNS, list(rows()))


if __name__ == "__main__":
    main()
