"""What a benchmark has written when its time ends in the middle."""

import argparse

import pytest
import torch

from benchmarks import bench_block, bench_linear, bench_optimizer
from benchmarks.measurement import NOT_REACHED, Budget, Table, read_rows
from benchmarks.roofline import Rates

CPU = torch.device("cpu")
RATES = Rates(1e9, 1e12, 2e12)


@pytest.fixture
def compiled(monkeypatch):
    """What was given to torch.compile, which does nothing."""
    modules = []
    monkeypatch.setattr(torch, "compile", lambda module, **_: modules.append(module) or module)
    return modules


class Pieces(Budget):
    """A budget for a number of pieces."""

    def __init__(self, number):
        super().__init__(1000.0)
        self.left = number

    def fits(self):
        self.left -= 1
        return self.left >= 0


@pytest.mark.long
def test_eager_rows_of_a_block_are_there_before_anything_is_compiled(compiled):
    arguments = argparse.Namespace(
        toy=True, variants=("bf16", "default"), modes=("eager", "compiled")
    )
    stages = bench_block.measure(2, arguments, CPU, Pieces(1))
    rows, profiled = next(stages)
    assert [(row["variant"], row["mode"]) for row in rows] == [
        ("bf16", "eager"),
        ("default", "eager"),
    ]
    assert all(row["median_ms"] > 0 for row in rows)
    assert {row["variant"] for row in profiled} == {"bf16", "default"}
    assert not compiled
    rows, profiled = next(stages)
    assert len(compiled) == 1
    found = {(row["variant"], row["mode"]): row for row in rows}
    assert found["default", "eager"]["speedup_over_compiled"] > 0
    assert found["bf16", "compiled"]["median_ms"] > 0
    assert found["default", "compiled"]["note"] == NOT_REACHED
    assert {(row["variant"], row["mode"]) for row in profiled} == {
        ("bf16", "eager"),
        ("default", "eager"),
        ("bf16", "compiled"),
    }
    assert not list(stages)


@pytest.mark.long
def test_our_optimizers_are_written_before_a_peer_begins_to_compile(tmp_path, monkeypatch):
    csv = tmp_path / "optimizer.csv"
    variants = [bench_optimizer.FUSED, "fp8, no residual", "torchao AdamW8bit"]
    there = []

    def compile_long(*_, **__):
        there.extend(row["variant"] for row in read_rows(csv))
        raise RuntimeError("it does not compile")

    monkeypatch.setattr(bench_optimizer.peers, "torchao_optimizer", compile_long)
    arguments = argparse.Namespace(variants=variants, toy=True, repetitions=1, budget=1000.0)
    columns = bench_optimizer.COLUMNS
    about = dict.fromkeys(("gpu", "driver", "torch"), "x")
    table = Table(csv, columns, columns[:3], about)
    bench_optimizer.measure(arguments, CPU, table.add)
    assert there == [*variants[:2], bench_optimizer.COPY]
    rows = {row["variant"]: row for row in read_rows(csv)}
    assert list(rows) == [*variants, bench_optimizer.COPY]
    assert rows["torchao AdamW8bit"]["note"] == "RuntimeError: it does not compile"
    assert float(rows["fp8, no residual"]["speedup"]) > 0


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "in pieces"])
def test_a_compiled_row_says_its_graphs_and_has_no_time_with_a_break(monkeypatch, broken):
    compiler = torch.compile

    def compiled(module, **_):
        if broken:
            forward = module.forward

            def in_pieces(*args, **options):
                torch._dynamo.graph_break()
                return forward(*args, **options)

            module.forward = in_pieces
        return compiler(module, backend="eager")

    monkeypatch.setattr(torch, "compile", compiled)
    block = {"q_proj": (32, 32), "down_proj": (32, 32)}
    budget = Budget(1000.0)
    module = torch.nn.Linear(32, 32, bias=False)
    tensors = (torch.randn(16, 32),), (torch.randn(16, 32),)
    (row,) = bench_linear._variants(
        module, *tensors, ("tensorwise",), "compiled", block, 16, RATES, CPU, budget
    )
    assert row["graphs"] == 1
    assert row["breaks"] == int(broken)
    assert ("median_ms" in row) is not broken
    assert row["note"].startswith("GraphBreaksError: not valid as compiled, 1 breaks") is broken
