"""What is served from an export has the perplexity of the training's forward, and its weights."""

import csv

import pytest
import torch

from benchmarks.evidence import export_loss, pretraining


def test_recorded_perplexities_are_within_the_band():
    with export_loss.RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["format"], row["recipe"]) for row in rows] == export_loss.CASES
    for row in rows:
        assert abs(float(row["rel_diff"])) <= export_loss.BAND, row
        assert row["weights_equal"] == row["fp8_layers"] == "14"
        assert float(row["bytes_per_bf16_byte"]) <= 0.52
        ratio = float(row["served_perplexity"]) / float(row["training_perplexity"]) - 1
        assert abs(ratio - float(row["rel_diff"])) < 1e-5
        assert float(row["training_perplexity"]) < 300  # of a vocabulary of 1,024: it has learned


@pytest.mark.long
def test_a_short_run_gives_such_rows(monkeypatch):
    monkeypatch.setattr(pretraining, "EVAL_WINDOWS", 16)
    tokens = torch.arange(4096) % 250
    base = export_loss.pretrained(tokens, 256, steps=1)
    model = export_loss.trained(base, "blockwise", tokens, steps=1)
    rows = export_loss.measure(model, "blockwise", tokens, steps=1)
    assert [row["format"] for row in rows] == ["fine-grained", "compressed-tensors"]
    assert all(row["weights_equal"] == row["fp8_layers"] == 14 for row in rows)
    assert all(abs(float(row["rel_diff"])) < 0.005 for row in rows)
