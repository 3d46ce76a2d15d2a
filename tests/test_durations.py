"""The rule for long tests, the record of what they take, and the order of files."""

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

def in_process():
    end = time.process_time() + 0.4
    while time.process_time() < end: pass

def in_a_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)

@pytest.fixture
def costly():
    in_process()

def test_short(): time.sleep(0.5)
def test_in_process(): in_process()
def test_in_a_child(): in_a_child()
def test_in_setup(costly): pass

@pytest.mark.long
def test_marked(): in_process()
"""


PARAMETRIZED = """
import pytest

@pytest.fixture(params=["a", "b", "c"])
def letter(request): return request.param

@pytest.mark.parametrize(("number", "twice"), [(0, 0), (1, 2)], ids=["0", "1"])
@pytest.mark.parametrize("other", ["x", "y"])
def test_costly(letter, other, number, twice): pass

@pytest.mark.long
@pytest.mark.parametrize("other", ["x", pytest.param("y", marks=pytest.mark.smoke), "z"])
@pytest.mark.parametrize("number", [0, 1])
def test_smoke(number, other): pass

@pytest.mark.parametrize("other", ["x", "y"])
def test_cheap(letter, other): pass

def test_plain(): pass
"""
COLLECT = """
import sys, pytest
from pathlib import Path
from tests import durations
durations.RECORD = Path(sys.argv[1])
pytest.main(["-q", "--collect-only", "-m", "not combination", sys.argv[2]], plugins=[durations])
"""


def test_a_long_test_without_the_marker_fails(tmp_path):
    file, junit = tmp_path / "test_some.py", tmp_path / "junit.xml"
    file.write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  long: as in the project\n")
    command = [sys.executable, "-c", RUN, str(file), str(junit)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "5 passed, 3 errors" in done.stdout
    for name in ("in_process", "in_a_child", "in_setup"):
        assert f"::test_{name} took 0." in done.stdout
    seconds = {name.split("::")[1]: s for name, s in durations.seconds_of(junit).items()}
    assert seconds["test_marked"] >= 0.35  # ticks are of 10 ms
    assert seconds["test_in_a_child"] >= 0.4
    assert seconds["test_short"] < 0.3


def test_of_a_costly_test_a_run_has_each_value_of_each_parameter(tmp_path):
    file, record = tmp_path / "test_some.py", tmp_path / "durations.json"
    file.write_text(PARAMETRIZED)
    markers = "".join(f"  {name}: as in the project\n" for name in ("long", "smoke", "combination"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{markers}")
    record.write_text(
        json.dumps({f"test_some.py::test_{name}": 1 for name in ("costly", "plain", "smoke")})
    )
    command = [sys.executable, "-c", COLLECT, str(record), str(file)]
    printed = subprocess.check_output(command, cwd=ROOT, text=True)
    names = [line.partition("::test_")[2] for line in printed.splitlines() if "::" in line]
    cheap = [f"cheap[{letter}-{other}]" for letter in "abc" for other in "xy"]
    costly = ["costly[a-x-0]", "costly[b-y-1]", "costly[c-x-0]"]
    smoke = ["smoke[0-y]", "smoke[1-y]", "smoke[0-x]", "smoke[0-z]"]
    assert sorted(names) == sorted([*costly, *smoke, *cheap, "plain"])


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
