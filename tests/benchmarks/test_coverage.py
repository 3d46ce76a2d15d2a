import pytest

from benchmarks import coverage


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
