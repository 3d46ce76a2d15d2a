"""Signals, settings and refusals, in processes that end at once or are made to."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import script_start

from .conftest import EXAMPLES

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


def _default_signals() -> None:
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)


def start(code: str, *arguments: str, **options) -> subprocess.Popen:
    """A process with the examples on its path; its first line has been read when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_default_signals,  # whoever runs the tests may ignore them, as nohup does
        **options,
    )
    process.first = process.stdout.readline()
    return process


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


WORK = """
    import shutil, sys, time, script_start
    script_start.begin()
    def main():
        try:
            print("started", flush=True)
            time.sleep(60)
        finally:
            print("cleaned", flush=True)
    script_start.run(main)
"""


def test_a_second_signal_does_not_wait():
    code = WORK.replace('print("cleaned", flush=True)', 'print("slow", flush=True); time.sleep(60)')
    process = start(code)
    process.terminate()
    assert process.stdout.readline() == "slow\n"
    process.terminate()
    assert process.wait(timeout=30) == -signal.SIGTERM


def test_what_the_shell_ignores_stays_ignored():
    """As under nohup."""
    code = WORK.replace(
        "import shutil", "import signal; signal.signal(1, signal.SIG_IGN); import os"
    )
    process = start(code)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=30) == 128 + signal.SIGTERM


PARENT = """
    import sys, child_process, script_start
    script_start.begin()
    child_process.GRACE = float(sys.argv[2])
    script_start.run(lambda: sys.exit(child_process.run([sys.executable, "-c", sys.argv[1]])))
"""
CHILD = """
import subprocess, sys, time, script_start
script_start.begin()
script_start.end_with_input()
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
try:
    print(grandchild.pid, flush=True)
    time.sleep(60)
finally:
    grandchild.kill()
    print("child cleaned", flush=True)
"""


@pytest.mark.parametrize("signum", SIGNALS, ids=lambda s: s.name)
def test_a_signal_to_the_parent_ends_its_children(signum):
    process = start(PARENT, CHILD, "20")
    process.send_signal(signum)
    out, error = process.communicate(timeout=60)
    assert out == "child cleaned\n"
    assert process.returncode == 128 + signum
    assert "Traceback" not in error
    wait_until(lambda: not is_running(int(process.first)))


def test_a_killed_parent_is_noticed_by_its_child():
    process = start(PARENT, CHILD, "20")
    process.kill()
    assert process.stdout.read() == "child cleaned\n"  # the pipe ends when the child has ended
    process.communicate(timeout=30)


def test_a_child_that_ignores_the_signal_is_killed():
    deaf = CHILD.replace("script_start.begin()", "import signal; signal.signal(15, signal.SIG_IGN)")
    process = start(PARENT, deaf, "0.5")
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert out == ""
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not is_running(int(process.first)))


def test_a_script_whose_launcher_was_killed_ends():
    child = "import os; os.environ['ACCELERATE_MIXED_PRECISION'] = 'fp8'" + textwrap.dedent(WORK)
    launcher = start(
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])", child
    )
    launcher.kill()
    assert launcher.stdout.read() == "cleaned\n"
    launcher.communicate(timeout=30)


def test_a_refusal_is_one_line_with_status_1():
    process = start(
        """
        import script_start
        def main():
            print(flush=True)
            raise script_start.Refusal("line 6: not JSON")
        script_start.run(main)
        """
    )
    _, error = process.communicate(timeout=30)
    assert error == "-c: error: line 6: not JSON\n"
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("idle", "given", "expected"),
    [
        (2.0, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (0.1, {}, {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}),
        (0.1, {"OMP_NUM_THREADS": "2"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (0.1, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"}, {}),
        (None, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
    ],
    ids=["idle", "busy", "threads given", "all given", "not known"],
)
def test_threads_are_set_where_the_user_has_set_nothing(monkeypatch, idle, given, expected):
    monkeypatch.setattr(script_start, "idle_cores", lambda: idle)
    monkeypatch.setattr(script_start, "_usable_cores", lambda: 2)
    assert script_start.thread_settings(given) == expected
