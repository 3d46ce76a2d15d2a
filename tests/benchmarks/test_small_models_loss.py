"""Losses of small models: what is recorded, and that a run can be told from another."""

import pytest
import torch

from benchmarks import small_models_loss as bench


@pytest.mark.parametrize("run", [bench.PERTURBED, bench.ROUNDED, "O2", "optimizer alone"])
def test_runs_differ_from_bf16_and_repeat(run):
    losses = [bench.train("llama", name, 0, steps=2) for name in (bench.BASELINE, run, run)]
    assert losses[1] == losses[2]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_summary_names_what_is_systematic():
    rows = {}
    for run, differences in (("O2", (0.01, 0.012, 0.011)), ("O3", (-0.02, 0.02, 0.01))):
        rows |= {("t5", run, i): {"rel_diff": str(d)} for i, d in enumerate(differences)}
    made = bench.summary(rows)
    assert bench.is_systematic(*made["t5", "O2"][:2])
    assert not bench.is_systematic(*made["t5", "O3"][:2])


def test_what_is_recorded_is_what_rounding_to_e4m3_costs():
    """Not more in FP8 than in stock BF16 whose linear layers see rounded operands, and 1.5 %."""
    made = bench.summary(bench.read_rows(bench.RESULTS))
    for model in ("llama", "gemma3", "mamba", "t5"):
        assert made[model, "O2"][0] < made[model, bench.ROUNDED][0] + 0.015
        assert abs(made[model, "optimizer alone"][0]) < 0.01


def test_operands_are_rounded_once_and_gradients_pass():
    layer = torch.nn.Linear(16, 16)
    bench.round_operands(torch.nn.Sequential(layer))
    x = torch.randn(4, 16, requires_grad=True)
    layer(x).sum().backward()
    assert len(bench._rounded(layer.weight).unique()) < layer.weight.numel()
    torch.testing.assert_close(x.grad, bench._rounded(layer.weight).sum(0).expand(4, 16))
