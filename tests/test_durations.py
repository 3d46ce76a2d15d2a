"""The rule for long tests, the record of what they take, and the order of files."""

import itertools
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


class Item(SimpleNamespace):
    """Stands for a collected test, with what is asked of it."""

    __hash__ = object.__hash__

    def get_closest_marker(self, name):
        return name in self.markers

    def add_marker(self, name):
        self.markers.append(name)


def items(function, *markers, **values):
    """The items of a test, by each combination of the parameters' values."""
    for chosen in itertools.product(*values.values()):
        params = dict(zip(values, chosen, strict=True))
        name = f"{function}[{'-'.join(chosen)}]"
        smoke = ["smoke"] if "smoke" in markers and params["other"] == "y" else []
        yield Item(nodeid=name, markers=smoke, callspec=SimpleNamespace(params=params))


def test_of_a_costly_test_a_run_has_each_value_of_each_parameter():
    cheap = list(items("a.py::test_cheap", letter="abc", other="xy"))
    costly = list(items("a.py::test_costly", letter="abc", other="xy", number="01"))
    smoke = list(items("a.py::test_smoke", "smoke", number="01", other="xyz"))
    plain = Item(nodeid="a.py::test_plain", markers=[])
    recorded = {f"a.py::test_{name}": 1 for name in ("costly", "smoke", "plain")}
    durations.mark_combinations([*cheap, *costly, *smoke, plain], recorded)

    def chosen(these):
        left = [item for item in these if "combination" not in item.markers]
        return [item.nodeid.partition("_")[2] for item in left]

    assert chosen([plain, *cheap]) == ["plain", *(f"cheap[{a}-{b}]" for a in "abc" for b in "xy")]
    assert len(chosen(costly)) == 3
    assert {letter for name in chosen(costly) for letter in name} >= set("abcxy01")
    assert chosen(smoke) == ["smoke[0-x]", "smoke[0-y]", "smoke[0-z]", "smoke[1-y]"]


def test_files_are_handed_out_longest_first_and_stay_whole():
    recorded = {"a.py::test_x": 1, "b.py::test_y": 3, "b.py::test_not_collected": 9, "c.py::t": 4}
    names = ["a.py::test_x[1]", "a.py::test_x[2]", "b.py::test_y", "c.py::t", "c.py::u"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    ordered = durations.longest_first(items, recorded)
    assert [item.nodeid for item in ordered] == [names[i] for i in (3, 4, 2, 0, 1)]


def test_every_file_of_the_record_is_there():
    """A file that was moved would be taken for a short one."""
    files = {name.partition("::")[0] for name in json.loads(durations.RECORD.read_text())}
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []
