"""Training gives the bits that are recorded: losses, gradient norms, checkpoints, resumed runs.

``bits.json`` has what the runs in cases.py and ranks.py gave; whoever restructures the engine
leaves all of it equal. ``python -m tests.golden.record`` writes it anew, in two minutes on two idle
cores; record.py says when that is legitimate. The tests compare wherever stock torch gives the
recorded bits; on another kind of machine, or with another release of torch, they are skipped with
a reason that names what differs. BF16 products are torch's own, whatever the other tests use.
"""

import pytest
import torch

from tests.golden.cases import CASES, recorded
from tests.golden.comparison import as_text, differences, not_resumed, read, why_not_comparable
from tests.golden.ranks import NAMES, recorded_on_ranks

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("stock_bf16_products")]


@pytest.fixture(scope="module")
def runs():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        everything = read()
        reason = why_not_comparable(everything)
        if reason is not None:
            pytest.skip(reason)
        yield everything["runs"]
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def on_ranks(runs, forked_hosts):
    return recorded_on_ranks(forked_hosts)


def _marked(name):
    return pytest.param(name, marks=pytest.mark.slow if CASES[name].compiled else ())


@pytest.mark.parametrize("name", [_marked(name) for name in CASES])
def test_one_process(runs, name):
    made = as_text(recorded(CASES[name]))
    assert differences(runs[name], made) == []
    assert not_resumed(made) == []


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(runs, on_ranks, name):
    made = as_text(on_ranks[name])
    assert differences(runs[name], made) == []
    assert not_resumed(made) == []


def test_all_that_is_recorded_is_compared():
    assert sorted(read()["runs"]) == sorted([*CASES, *NAMES])


def test_another_machine_is_named():
    recorded_elsewhere = read()
    recorded_elsewhere["stock"] = {}
    recorded_elsewhere["machine"]["processor"] = "another"
    assert "processor" in why_not_comparable(recorded_elsewhere)
    recorded_elsewhere["machine"]["torch"] = "2.0.0"
    assert "release of torch: torch" in why_not_comparable(recorded_elsewhere)
