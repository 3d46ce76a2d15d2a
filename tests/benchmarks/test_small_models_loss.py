"""Losses of small models: what is recorded, and that a run can be told from another."""

import pytest
import torch

from benchmarks.evidence import small_models_loss as bench
from benchmarks.rows import RESULTS, ROOT


@pytest.mark.long
@pytest.mark.parametrize(
    "run", [bench.PERTURBED, bench.ROUNDED, bench.ROUNDED_ALL, "O2", "optimizer alone"]
)
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


@pytest.mark.parametrize("model", bench.MODELS)
def test_what_is_recorded_is_what_rounding_to_8_bits_costs(model):
    """Of ten seeds each: nothing systematic beyond stock BF16 that multiplies rounded operands."""
    rows = bench.read_rows(bench.RESULTS)
    for run in (bench.BASELINE, bench.PERTURBED, bench.ROUNDED, bench.ROUNDED_ALL, "O2"):
        assert {seed for m, r, seed in rows if (m, r) == (model, run)} == set(range(10))
    mean, error = bench.paired(rows, model, "O2", bench.ROUNDED_ALL)
    assert not bench.is_systematic(mean, error)
    assert abs(mean) < 0.0075
    assert abs(bench.summary(rows)[model, bench.PERTURBED][0]) < bench.BAND


def test_pairs_are_of_the_same_seeds():
    rows = {("t5", "O2", seed): {"rel_diff": str(0.01 * seed)} for seed in range(4)}
    rows |= {("t5", "O1", seed): {"rel_diff": str(0.01 * seed - 0.02)} for seed in range(1, 5)}
    assert bench.paired(rows, "t5", "O2", "O1") == pytest.approx((0.02, 0.0))


def test_operands_of_all_gemms_are_rounded_once_and_gradients_pass():
    torch.manual_seed(0)
    layer, small = torch.nn.Linear(16, 24), torch.nn.Linear(24, 8)
    stock = torch.nn.Linear(16, 24)
    stock.load_state_dict(layer.state_dict())
    x, grad = torch.randn(40, 16), torch.randn(40, 24)
    rounded, e4m3, e5m2 = bench._near, torch.float8_e4m3fn, torch.float8_e5m2
    weight, inputs = rounded(stock.weight.detach(), e4m3), rounded(x, e4m3)
    for gradients in (False, True):
        bench.round_operands(torch.nn.Sequential(layer, small), gradients)
        layer.zero_grad()
        given = x.clone().requires_grad_()
        layer(given).backward(grad)
        expected = rounded(grad, e5m2) if gradients else grad
        assert torch.equal(expected, grad) != gradients
        torch.testing.assert_close(layer(x), inputs @ weight.T + stock.bias)
        torch.testing.assert_close(given.grad, expected @ weight)
        torch.testing.assert_close(layer.weight.grad, expected.T @ inputs)
        torch.testing.assert_close(layer.bias.grad, grad.sum(0))
    assert torch.equal(rounded(rounded(x, e4m3), e4m3), rounded(x, e4m3))
    assert "forward" not in small.__dict__  # too small for FP8


@pytest.mark.parametrize("model", ["llama", "gemma3", "qwen3_moe"])
def test_an_int8_momentum_stays_within_the_spread_of_stock_muon(model):
    rows = bench.read_rows(RESULTS / "muon_loss.csv")
    runs = (bench.MUON_PERTURBED, bench.MUON_INT8)
    for run in (bench.MUON, *runs):
        assert {seed for m, r, seed in rows if (m, r) == (model, run)} == set(range(10))
    perturbed, int8 = (bench.paired(rows, model, run, bench.MUON) for run in runs)
    assert not bench.is_systematic(*int8)
    assert abs(int8[0]) <= 2 * (int8[1] ** 2 + perturbed[1] ** 2) ** 0.5
    cells = [f"{100 * mean:+.2f} ± {100 * error:.2f} %" for mean, error in (perturbed, int8)]
    assert f"| {model} | {' | '.join(cells)} |" in (ROOT / "docs" / "results.md").read_text()
