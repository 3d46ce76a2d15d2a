"""Calls of every operator's launcher, played: the bytes that the launcher itself makes."""

import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def differences(interpreted):
    """Case -> in what a played call differed."""
    return interpreted("interpreted_replay_cases.py")


def test_played_calls_make_and_write_the_same_bytes(differences):
    assert len(differences) > 130
    assert {case: found for case, found in differences.items() if found} == {}
