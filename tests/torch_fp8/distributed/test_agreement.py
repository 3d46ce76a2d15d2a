import pytest

from tests.internals import format_ranks


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([1, 3], "ranks 1, 3")]
)
def test_ranks_are_shown_as_runs(ranks, text):
    assert format_ranks(ranks) == text
