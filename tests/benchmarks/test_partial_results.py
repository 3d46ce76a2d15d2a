"""What a benchmark has written when its time ends in the middle."""

import argparse
import sys

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
def test_what_was_not_compiled_of_a_block_stands_beside_its_eager_rows(
    compiled, tmp_path, monkeypatch
):
    monkeypatch.setattr(bench_block, "Budget", lambda seconds: Pieces(2))
    csv = tmp_path / "block.csv"
    command = [
        "bench_block",
        "--toy",
        "--modes",
        "eager",
        "compiled",
        "--variants",
        "bf16",
        "default",
    ]
    monkeypatch.setattr(sys, "argv", [*command, "--csv", str(csv)])
    bench_block.main()
    notes = {(row["variant"], row["mode"]): row["note"] for row in read_rows(csv)}
    assert notes == {
        ("bf16", "eager"): "",
        ("default", "eager"): "",
        ("bf16", "compiled"): "",
        ("default", "compiled"): NOT_REACHED,
    }


@pytest.mark.long
def test_linears_are_compiled_one_by_one_as_far_as_the_budget_goes(compiled):
    block = dict.fromkeys(bench_linear.LLAMA_3_1_8B_BLOCK, (64, 64))
    variants = ("bf16", "tensorwise", "delayed")
    rows = bench_linear.measure(block, 32, variants, "compiled", RATES, CPU, Pieces(4))
    notes = [(row["linear"], row["variant"], row["note"]) for row in rows]
    assert notes == [
        *(("together", variant, "") for variant in variants),
        ("chain", "bf16", ""),
        *(("chain", variant, NOT_REACHED) for variant in variants[1:]),
    ]
    assert len(compiled) == 4


def test_the_fastest_of_each_shape_is_written_with_each_size(tmp_path, monkeypatch):
    def measured(block, m, variants, mode, rates, device, budget):
        if m == 32:
            raise KeyboardInterrupt
        row = {"linear": "q_proj", "M": m, "K": 64, "N": 64, "mode": mode}
        return [row | {"variant": name, "median_ms": 1.0} for name in ("bf16", "tensorwise")]

    monkeypatch.setattr(bench_linear, "measure", measured)
    monkeypatch.setattr(bench_linear, "measured_rates", lambda device, toy: RATES)
    command = [
        "bench_linear",
        "--toy",
        "--tokens",
        "16",
        "32",
        "--csv",
        str(tmp_path / "linear.csv"),
    ]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(KeyboardInterrupt):
        bench_linear.main()
    (row,) = read_rows(tmp_path / "linear_shapes.csv")
    assert row["M"] == "16"


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


def test_peers_that_are_not_reached_have_a_row(tmp_path):
    arguments = argparse.Namespace(
        variants=[bench_optimizer.FUSED, "torchao AdamW8bit"], toy=True, repetitions=1, budget=0.0
    )
    table = Table(
        tmp_path / "optimizer.csv", bench_optimizer.COLUMNS, bench_optimizer.COLUMNS[:3], {}
    )
    bench_optimizer.measure(arguments, CPU, table.add)
    notes = {row["variant"]: row["note"] for row in read_rows(table.path)}
    assert notes["torchao AdamW8bit"] == NOT_REACHED


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
