"""One process after the other, none of which outlives the script that started it."""

import contextlib
import os
import signal
import subprocess
import time

GRACE = 20.0
"""The seconds from the signal until what has not ended is killed."""


def run(command: list[str]) -> int:
    """Run a command to its end and return its exit status.

    The command gets a process group of its own and a pipe as its standard input. Whatever ends the
    wait (a signal that is raised as an exception) ends the whole group, the launcher's children
    included; if this process is killed, the pipe ends, which `script_start.end_with_input` notices.

    Args:
        command: arguments of the process.
    Returns:
        its status; 128 + the signal's number if one ended it.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        status = process.wait()
    except BaseException:
        _end_group(process)
        raise
    finally:
        process.stdin.close()
    return status if status >= 0 else 128 - status


def _end_group(process: subprocess.Popen) -> None:
    """Send SIGTERM to the group, and after a while SIGKILL; return when no process of it is
    left.
    """
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(ProcessLookupError):  # nobody left
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
