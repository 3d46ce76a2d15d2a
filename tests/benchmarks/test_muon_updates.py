"""Muon's update from a momentum of 8 bits: what is recorded, and a short run measured."""

import pytest

from benchmarks.evidence import muon_updates as bench
from benchmarks.rows import RESULTS, ROOT, read_rows


@pytest.fixture(scope="module")
def recorded():
    rows = read_rows(RESULTS / "muon_updates.csv")
    return {
        (r["spectrum"], float(r["signal_to_noise"]), r["format"]): float(r["least"]) for r in rows
    }


def test_everything_is_recorded(recorded):
    wanted = {(s, r, f) for s in bench.SPECTRA for r in bench.RATIOS for f in bench.FORMATS}
    assert set(recorded) == wanted


@pytest.mark.parametrize("spectrum", bench.SPECTRA)
def test_int8_keeps_the_update_where_noise_is_as_large_as_the_signal(recorded, spectrum):
    for ratio in (0.3, 1.0):
        assert recorded[spectrum, ratio, "int8"] >= bench.TARGET
        assert recorded[spectrum, ratio, bench.GATHERED] >= bench.TARGET
        assert recorded[spectrum, ratio, "int8"] >= recorded[spectrum, ratio, "int8 random"]
        assert recorded[spectrum, ratio, "int8"] > recorded[spectrum, ratio, "e4m3"]


def test_a_short_run_measures_int8_ahead_of_e4m3():
    int8, e4m3 = (bench.cosine("e^-5", 1.0, name, 0, steps=12) for name in ("int8", "e4m3"))
    assert int8 > 0.995
    assert e4m3 < int8 - 0.003


def test_the_page_has_what_is_recorded(recorded):
    page = (ROOT / "docs" / "results.md").read_text()
    for spectrum in bench.SPECTRA:
        values = [recorded[spectrum, 1.0, name] for name in ("int8", bench.GATHERED, "e4m3")]
        assert f"| {spectrum} | {' | '.join(f'{value:.4f}' for value in values)} |" in page
