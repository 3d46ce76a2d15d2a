from pathlib import Path

import pytest

from tests.planted import FAULTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("room", FAULTS)
def test_every_fault_can_be_planted(room):
    names = [fault.name for fault in FAULTS[room]]
    assert len(set(names)) == len(names) >= 5
    for fault in FAULTS[room]:
        assert (ROOT / fault.file).read_text().count(fault.right) == 1, fault.name
        assert fault.right not in fault.wrong, fault.name
        for test in fault.tests.split():
            assert (ROOT / test.partition("::")[0]).exists(), fault.name
