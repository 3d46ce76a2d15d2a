import json
from pathlib import Path

import pytest
import torch

from benchmarks.evidence.graph_counts import BF16, PROGRAMS, excess
from benchmarks.rows import RESULTS, read_rows
from tests.compiled_graphs import Graphs
from tests.processes import ran

ROOT = Path(__file__).resolve().parents[2]
RECORDED = {(row["program"], row["level"]): row for row in read_rows(RESULTS / "graph_counts.csv")}
BEFORE_FORWARD = {"DDP": 1, "DDP, one graph": 1}
"""Breaks that torch has in a DistributedDataParallel with any hook in front of its forward."""
COUNTED_AGAIN = (
    *(("Qwen3-MoE", "O2"), ("gradient release", "O3")),
    *(("LoRA", "O2"), ("configure_model", "O3")),
)
SCRIPT = """
import json, sys
from benchmarks.evidence.graph_counts import counted
print(json.dumps([counted(*row) for row in json.loads(sys.argv[1])]))
"""


def test_all_programs_are_recorded_and_none_has_more_than_bf16():
    rows = {(name, level) for name, program in PROGRAMS.items() for level in program.levels}
    assert RECORDED.keys() == rows
    assert not [row for row in RECORDED.values() if row["failure"]]
    more = {row["program"]: excess(row) for row in RECORDED.values() if excess(row)}
    assert more == BEFORE_FORWARD


@pytest.fixture(scope="module")
def counts(forked_hosts):
    """By program and level; BF16's where the record is of another torch."""
    rows = list(COUNTED_AGAIN)
    rows += [(name, BF16) for name, _ in rows if RECORDED[name, "O3"]["torch"] != torch.__version__]
    command = (forked_hosts, "-c", SCRIPT, json.dumps(rows))
    done = ran(*command, cwd=ROOT, TOKENIZERS_PARALLELISM="false")
    return dict(zip(rows, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.long
@pytest.mark.parametrize(("name", "level"), COUNTED_AGAIN)
def test_no_more_than_bf16(counts, name, level):
    graphs, failure = counts[name, level]
    assert not failure
    row = {**RECORDED[name, level], **Graphs(*graphs)._asdict()}
    if (name, BF16) in counts:
        row |= {f"bf16_{key}": n for key, n in Graphs(*counts[name, BF16][0])._asdict().items()}
    assert excess(row) == 0
