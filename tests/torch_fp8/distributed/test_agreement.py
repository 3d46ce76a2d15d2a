"""One rank of a comparison, whose leader the test plays, over a store of this process."""

import json

import pytest
import torch.distributed as dist

from torch_fp8.distributed import agreement
from torch_fp8.distributed.agreement import format_ranks

FIRST, SECOND = "torch_fp8/agreement/first", "torch_fp8/agreement/second"


class Store:
    """A store in which the leader acts just before rank 1 reads who leads."""

    def __init__(self):
        self.store, self.acts = dist.HashStore(), []

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get(self, key):
        if key.endswith("/leader") and self.acts:
            self.acts.pop(0)()
        return self.store.get(key)


@pytest.fixture
def meeting(monkeypatch):
    """Rank 1 of two, in a comparison that rank 0 leads as `FIRST`."""

    class Group:
        group_name = "0"

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    made = agreement._Meeting(Store(), Group, 30, '{"seed": "0"}', "")
    made._store.set(made.leader_key, FIRST)
    return made


def conclude(meeting, name, result):
    """As the leader does, for a rank that has come."""
    place = json.loads(meeting._store.get(f"{name}/1"))
    meeting._store.set(f"{name}/result", json.dumps(result))
    meeting._store.set(f"{place[1]}/result in", name)


def test_a_leader_that_goes_on_at_once_gets_no_description_of_the_comparison_before(meeting):
    def go_on():
        conclude(meeting, FIRST, {"missing": [], "texts": {}, "came": []})
        meeting._store.set(meeting.leader_key, SECOND)

    meeting._store.acts = [lambda: None, go_on]
    name, result = meeting.hold()
    assert (name, result["missing"]) == (FIRST, [])
    assert not meeting._store.check([f"{SECOND}/1"])


def test_what_an_earlier_leader_has_left_is_not_read(meeting):
    store = meeting._store
    store.set(f"{FIRST}/result", json.dumps({"missing": [0], "texts": {}, "came": [[1, "x", ""]]}))
    store.acts = [
        lambda: None,
        lambda: store.set(meeting.leader_key, SECOND),
        lambda: conclude(meeting, SECOND, {"missing": [], "texts": {}, "came": []}),
    ]
    name, result = meeting.hold()
    assert (name, result["missing"]) == (SECOND, [])


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([1, 3], "ranks 1, 3")]
)
def test_ranks_are_shown_as_runs(ranks, text):
    assert format_ranks(ranks) == text
