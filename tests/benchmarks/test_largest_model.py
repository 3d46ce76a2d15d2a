"""The search for the largest model that fits."""

import pytest

from benchmarks.evidence import largest_model
from benchmarks.evidence.largest_model import _MOST_LAYERS, _STEP, figure


@pytest.mark.parametrize("last", [0, 4, 120, 400])
@pytest.mark.parametrize("fitting", [0, 3, 4, 116, 120, 124, 300, 400])
def test_it_is_found_from_wherever_the_search_begins(fitting, last, monkeypatch):
    tried = []

    def needs(layers, *_):
        tried.append(layers)
        return 10 * layers, 100 * layers, layers <= fitting

    monkeypatch.setattr(largest_model, "_needs", needs)
    monkeypatch.setattr(largest_model, "_found_last", lambda *_: last)
    (found,) = figure((8,), ("O2",))
    want = fitting // _STEP * _STEP
    assert (found.layers or 0, found.peak) == (want, 10 * want)
    assert len(tried) == len(set(tried)) <= 13
    assert min(tried) >= _STEP
    assert max(tried) <= _MOST_LAYERS
    if last and abs(last - want) <= _STEP:
        assert len(tried) <= 4
