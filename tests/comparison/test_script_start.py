"""Signals, settings and refusals, in processes that end at once or are made to."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import script_start

from .conftest import COMPARISON

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
WORK = """
    import sys, time, script_start
    script_start.begin()
    def main():
        try:
            print("started", flush=True)
            time.sleep(60)
        finally:
            print("cleaned", flush=True)
    script_start.run(main)
"""


def start(code: str) -> subprocess.Popen:
    """A process with the modules on its path; its first line has been read when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(COMPARISON)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests may ignore them, as nohup does.
        preexec_fn=lambda: [signal.signal(signum, signal.SIG_DFL) for signum in SIGNALS],
    )
    process.stdout.readline()
    return process


@pytest.mark.parametrize("signum", SIGNALS, ids=lambda s: s.name)
def test_a_signal_is_the_status_and_what_was_begun_is_cleaned_up(signum):
    process = start(WORK)
    process.send_signal(signum)
    assert process.communicate(timeout=30) == ("cleaned\n", "")
    assert process.returncode == 128 + signum


def test_a_second_signal_does_not_wait():
    code = WORK.replace('print("cleaned", flush=True)', 'print("slow", flush=True); time.sleep(60)')
    process = start(code)
    process.terminate()
    assert process.stdout.readline() == "slow\n"
    process.terminate()
    assert process.wait(timeout=30) == -signal.SIGTERM


def test_what_the_shell_ignores_stays_ignored():
    """As under nohup."""
    code = WORK.replace("import sys", "import signal; signal.signal(1, signal.SIG_IGN); import sys")
    process = start(code)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=30) == 128 + signal.SIGTERM


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
    ("given", "expected"),
    [
        ({"OMP_NUM_THREADS": "2"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {}),
        ({"GOMP_SPINCOUNT": "9"}, {}),
    ],
)
def test_threads_sleep_where_the_user_has_set_nothing(given, expected):
    assert script_start.thread_settings(given) == expected
