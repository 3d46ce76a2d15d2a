import pytest

from benchmarks import coverage


def test_a_row_is_measured_once_unless_it_failed(monkeypatch, tmp_path):
    measured = []

    def measure(name):
        measured.append(name)
        row = dict.fromkeys(coverage.COLUMNS, "1") | {"architecture": name, "failure": ""}
        if name == "bart" and measured.count(name) == 1:
            row["failure"] = "TypeError: a | b"
        return row

    monkeypatch.setattr(coverage, "measure", measure)
    results = tmp_path / "coverage.csv"
    monkeypatch.setattr("sys.argv", ["coverage", "t5", "bart", "--csv", str(results)])

    def document():
        return coverage.document(coverage.by_architecture(results), {})

    coverage.main()
    assert "| bart | 1 | | | | 1 | fails | TypeError: a / b |" in document()
    coverage.main()
    assert measured == ["t5", "bart", "bart"]
    assert list(coverage.by_architecture(results)) == ["bart", "t5"]  # in the order of KINDS
    assert "| t5 | 1 | 1 of 1 | 100.0 % | 100.0 % | 1 | 1 | +100.00 % |" in document()


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "falcon", "mixtral", "t5", "vit"])
def test_an_architecture_trains_in_both(name, monkeypatch):
    """One of each kind, with Conv1D, a subclass of nn.Linear, and experts."""
    bf16, none = coverage.train(name, None, steps=3)
    fp8, report = coverage.train(name, coverage.FP8Config(), steps=3)
    assert none is None
    assert fp8[-1] < fp8[0]
    assert fp8[-1] == pytest.approx(bf16[-1], abs=0.03 * bf16[0])
    assert bool(report.experts) == (name == "mixtral")
    assert report.flops.experts == 0
    assert report.flops_share > 0.85
