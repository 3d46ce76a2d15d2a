"""A compiled row of the linear benchmark."""

import pytest
import torch

from benchmarks import bench_linear
from benchmarks.measurement import Budget
from benchmarks.roofline import Rates

CPU = torch.device("cpu")
RATES = Rates(1e9, 1e12, 2e12)


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
