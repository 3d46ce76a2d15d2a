import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests import durations

ROOT = Path(__file__).resolve().parents[1]
RUN = """
import sys, pytest
from tests import durations
durations.LIMIT_S = 0.3
durations.slowness = lambda: 1.0
sys.exit(pytest.main([sys.argv[1], "-q", "-p", "no:cacheprovider", "--junit-xml", sys.argv[2]],
                     plugins=[durations]))
"""
TESTS = """
import subprocess, sys, time
import pytest

BURN = "import time\\nwhile time.process_time() < 0.5: pass"

@pytest.fixture
def costly():
    end = time.process_time() + 0.4
    while time.process_time() < end: pass

def test_short(): time.sleep(0.5)
def test_in_a_child(): subprocess.run([sys.executable, "-c", BURN], check=True)
def test_in_setup(costly): pass

@pytest.mark.long
def test_marked(costly): pass
"""


def test_a_long_test_without_the_marker_fails(tmp_path):
    file, junit = tmp_path / "test_some.py", tmp_path / "junit.xml"
    file.write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  long: as in the project\n")
    command = [sys.executable, "-c", RUN, str(file), str(junit)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "4 passed, 2 errors" in done.stdout
    for name in ("in_a_child", "in_setup"):
        assert f"::test_{name} took 0." in done.stdout
    seconds = {name.split("::")[1]: s for name, s in durations.seconds_of(junit).items()}
    assert seconds["test_marked"] >= 0.35  # ticks are of 10 ms
    assert seconds["test_in_a_child"] >= 0.4
    assert seconds["test_short"] < 0.3


def test_every_file_of_the_record_is_there():
    """A file that was moved would be taken for a short one."""
    files = {name.partition("::")[0] for name in json.loads(durations.RECORD.read_text())}
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []


class Item:
    def __init__(self, *values):
        self.nodeid, self.marks = "tests/a.py::test_b[c]", []
        self.callspec = SimpleNamespace(params=dict(enumerate(values)))
        self.add_marker, self.get_closest_marker = self.marks.append, {}.get


def test_a_costly_parametrized_test_has_samples_and_fast_takes_those_of_half_a_second():
    items = [Item(x, y) for x in "abcd" for y in "ab"]
    durations.mark_samples(items, {"tests/a.py::test_b": 1.2})
    marks = sorted(mark for item in items for mark in item.marks)
    assert marks == ["combination"] * 4 + ["costly"] * 3
