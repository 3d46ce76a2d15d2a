"""One order for the whole run, divided among processes and resumable."""

import pytest
from run_order import RunOrder


def test_every_epoch_reads_everything_once_in_another_order():
    indices = list(RunOrder(num_examples=10, num_samples=30, seed=0))
    epochs = [indices[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("start", [0, 1, 7, 10, 23, 30])
def test_a_resumed_order_is_the_rest_of_the_whole(start):
    whole = list(RunOrder(10, 30, seed=3))
    rest = RunOrder(10, 30, seed=3, start=start)
    assert list(rest) == whole[start:]
    assert len(rest) == 30


def test_processes_share_the_order_without_overlap():
    whole = list(RunOrder(10, 30, seed=3))
    shares = [list(RunOrder(10, 10, seed=3, rank=rank, world_size=3)) for rank in range(3)]
    assert [index for together in zip(*shares, strict=True) for index in together] == whole
