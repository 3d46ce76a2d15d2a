"""The ranks that are missing in a meeting, over a store of this process; and how they are shown."""

import pytest
import torch.distributed as dist

from tests.internals import agreement, format_ranks


class Store:
    """A store that counts how often it is asked."""

    def __init__(self, came):
        self.store, self.requests = dist.HashStore(), 0
        for number in came:
            self.store.set(str(number), "")

    def check(self, keys):
        self.requests += 1
        return self.store.check(keys)


@pytest.mark.parametrize(
    "missing", [[], [0], [5], [2, 3, 6], [*range(8)]], ids=lambda missing: f"{len(missing)}"
)
def test_missing_ranks_are_found(missing):
    store = Store(set(range(8)) - set(missing))
    assert agreement._missing(store, range(8)) == missing


def test_a_missing_node_among_thousands_of_ranks_takes_few_requests():
    missing = list(range(1024, 1032))
    store = Store(set(range(4096)) - set(missing))
    assert agreement._missing(store, range(4096)) == missing
    assert store.requests < 50


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([1, 3], "ranks 1, 3")]
)
def test_ranks_are_shown_as_runs(ranks, text):
    assert format_ranks(ranks) == text
