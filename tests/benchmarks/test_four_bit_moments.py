"""A first moment in 4 bits: what is recorded, and a short run measured."""

import pytest

from benchmarks.evidence import four_bit_moments as bench
from benchmarks.evidence import four_bit_training, small_models_loss
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


def test_losses_of_ten_seeds_are_those_of_the_page(monkeypatch):
    rows = read_rows(RESULTS / "four_bit_training.csv")
    assert four_bit_training.table(rows) in (ROOT / "docs" / "results.md").read_text()
    assert {seeds for _, _, seeds in four_bit_training.differences(rows).values()} == {10}


def test_a_loss_is_measured(monkeypatch):
    monkeypatch.setattr(small_models_loss, "LEARNING_RATE", 2e-3)
    monkeypatch.setitem(small_models_loss.RUNS, "four bits", (None, None))
    train = small_models_loss.train
    monkeypatch.setattr(small_models_loss, "train", lambda *run: train(*run, steps=3))
    losses = [four_bit_training.loss("llama", 1.0, 0, bits) for bits in (8, 4)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
