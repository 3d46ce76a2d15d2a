"""Signals, settings and refusals, in processes that end at once or are made to."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

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
