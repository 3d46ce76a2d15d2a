"""Rounding by a sequence: the words that it makes, and what is recorded of it."""

import pytest
import torch

from benchmarks.evidence import low_discrepancy as bench
from benchmarks.rows import RESULTS, ROOT, read_rows
from torch_fp8.quantization.stochastic_rounding import element_index


@pytest.fixture(scope="module")
def recorded():
    return read_rows(RESULTS / "low_discrepancy.csv")


def test_everything_is_recorded(recorded):
    wanted = {tuple(map(str, case.values())) for case in bench.cases([*range(10)], bench.MODELS)}
    assert {tuple(row[name] for name in bench.KEY) for row in recorded} == wanted


def test_the_page_has_what_is_recorded(recorded):
    page = (ROOT / "docs" / "results.md").read_text()
    for model, (mean, error, seeds) in bench.differences(recorded).items():
        assert seeds == 10
        assert f"{100 * mean:+.2f} ± {100 * error:.2f} % ({model})" in page.replace("\n", " ")
    figures = {
        (r["store"], r["rounding"]): f"{float(r['cosine']):.4f} | {float(r['norm_ratio']):.4f}"
        for r in recorded
        if r["lr"] == "1e-06"
    }
    for store in bench.STORES:
        assert f"| `{store}` | {figures[store, 'random']} | {figures[store, 'sequence']} |" in page


def test_thresholds_of_an_element_are_spread_evenly():
    """Of 64 steps in a row each quarter of the range has its share, of each kind of rounding."""
    index = element_index(4, 8, 0, 0, 8, torch.device("cpu"))
    steps = torch.stack([bench.words(index, (3, step)) for step in range(100, 164)])
    for shift, bits in ((0, 8), (8, 8), (16, 16)):
        quarter = (steps >> shift & ((1 << bits) - 1)) >> (bits - 2)
        for q in range(4):
            assert ((quarter == q).sum(0) - 16).abs().max() <= 3


@pytest.mark.slow
def test_a_step_rounds_by_the_sequence_within_alone():
    losses = []
    for name in (bench.RANDOM, bench.SEQUENCE, bench.RANDOM):
        case = {"experiment": "llama", "rounding": name, "seed": 0}
        losses.append(bench.measure(case, 1)["loss"])
    assert losses[0] == losses[2] != losses[1]
