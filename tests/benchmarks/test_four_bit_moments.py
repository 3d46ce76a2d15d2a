"""A first moment in 4 bits: what is recorded, and a short run measured."""

import statistics

import pytest
import torch

from benchmarks.evidence import four_bit_moments as bench
from benchmarks.evidence import four_bit_training, pretraining, small_models_loss
from benchmarks.rows import RESULTS, ROOT, read_rows


@pytest.fixture(scope="module")
def recorded():
    rows = read_rows(RESULTS / "four_bit_moments.csv")
    keys = ("seed", "spread", "sparsity", "beta2")
    return {
        (r["format"], *(float(r[k]) for k in keys)): (float(r["cosine"]), float(r["norm"]))
        for r in rows
    }


def test_everything_is_recorded(recorded):
    wanted = {
        (name, seed, spread, sparsity, beta2)
        for name in bench.FORMATS
        for seed in bench.SEEDS
        for spread in bench.SPREADS
        for sparsity in bench.SPARSITIES
        for beta2 in bench.BETAS2
    }
    assert set(recorded) == wanted


def test_the_ratio_passes_for_sparse_gradients_in_groups_of_8_alone(recorded):
    for (name, _, spread, sparsity, _), values in recorded.items():
        if name in ("ratio 8", "ratio 16") and spread < 3:
            assert bench.passes(*values) == (name == "ratio 8" or sparsity == 0)
        if name in ("exponent", "e2m1"):
            assert not bench.passes(*values)
    page = (ROOT / "docs" / "results.md").read_text()
    for sparsity in bench.SPARSITIES:
        least = [
            min(
                recorded[name, seed, spread, sparsity, b][0]
                for seed in bench.SEEDS
                for spread in (0.5, 1.5)
                for b in bench.BETAS2
            )
            for name in ("8 bits", "ratio 8", "ratio 16", "exponent", "e2m1")
        ]
        assert f"| {100 * sparsity:.0f} % | {' | '.join(f'{x:.3f}' for x in least)} |" in page


def test_what_is_recorded_is_what_is_measured():
    measured = bench.displacements(0.5, 0.0, 0.95, steps=40)
    assert measured["ratio 8"][0] > measured["ratio 16"][0] > 0.99
    assert measured["exponent"][1] < 0.9


def test_losses_of_ten_seeds_are_those_of_the_page():
    rows = read_rows(RESULTS / "four_bit_training.csv")
    page = (ROOT / "docs" / "results.md").read_text()
    assert four_bit_training.table(rows) in page
    assert four_bit_training.table(rows, "exponent") in page
    assert four_bit_training.table(rows, "random") in page
    cases = four_bit_training.differences(rows)
    assert {experiment for experiment, *_ in cases} == set(four_bit_training.SEEDS)
    for (experiment, _, _, bits), (mean, error, seeds) in cases.items():
        assert seeds == four_bit_training.SEEDS[experiment]
        if experiment == "small-models" and bits == "4":
            band = small_models_loss.BAND, small_models_loss.ERRORS * error
            assert abs(mean) <= max(band), "systematic, which the page denies"
        if experiment != "small-models":
            losses = [
                statistics.mean(
                    float(r["loss"])
                    for r in rows
                    if r["experiment"] == experiment and r["moment_bits"] == bits
                )
                for bits in "84"
            ]
            spread = "" if seeds == 1 else f" ± {100 * error:.2f}"
            cells = [
                str(seeds),
                *(f"{loss:.4f}" for loss in losses),
                f"{100 * mean:+.2f}{spread} %",
            ]
            assert f"| {' | '.join(cells)} |" in page


def test_a_step_of_fine_tuning_is_as_good_with_4_bits():
    rows = [r for r in read_rows(RESULTS / "four_bit_training.csv") if r["cosine"]]
    for column in ("cosine", "norm"):
        means = [
            statistics.mean(float(r[column]) for r in rows if r["moment_bits"] == bits)
            for bits in "84"
        ]
        assert means[1] == pytest.approx(means[0], abs=0.003)


def test_a_loss_is_measured(monkeypatch):
    monkeypatch.setattr(small_models_loss, "LEARNING_RATE", 2e-3)
    monkeypatch.setitem(small_models_loss.RUNS, "four bits", (None, None))
    train = small_models_loss.train
    monkeypatch.setattr(
        small_models_loss, "train", lambda *run, **options: train(*run, steps=3, **options)
    )
    losses = [
        float(four_bit_training.measure("small-models", "llama", "1", "0", bits)["loss"])
        for bits in ("8", "4", "exponent")
    ]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.02)
    assert len(set(losses)) == 3


@pytest.mark.long
def test_fine_tuning_is_measured(monkeypatch):
    tokens = torch.randint(64, (2, 4096), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(pretraining, "corpus", lambda: (*tokens, 64))
    monkeypatch.setattr(pretraining, "STEPS", 2)
    monkeypatch.setattr(pretraining, "EVAL_WINDOWS", 16)
    monkeypatch.setattr(four_bit_training, "FINE_TUNING_STEPS", 3)
    monkeypatch.setattr(four_bit_training, "FINE_TUNING_RATE", 1e-4)
    result = four_bit_training.measure("fine-tuning", "llama, 0.5M", "1", "0", "4")
    assert 0.95 < float(result["cosine"]) < 1
    assert 0.95 < float(result["norm"]) < 1.05
