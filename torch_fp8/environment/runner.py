"""Runs checks, each in its own process.

A check that raises, hangs, or ends its process only fails its own line. Processes and temporary
folders are removed when the last check is done, and when this process is interrupted.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from torch_fp8.environment.check import Check
from torch_fp8.environment.hosts import child_environment
from torch_fp8.environment.result import FAILED, NOT_RUN, Result, last_line

_START_LIMIT_S = 180.0
_LOG_CHARACTERS = 8000
_POLL_S = 0.05
# Variables of a launcher or scheduler are for the user's run, not for single-process checks.
_NOT_INHERITED = (
    *("ACCELERATE_", "FSDP_", "PL_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "TORCH_FP8_CONFIG"),
)


def run_checks(checks: Sequence[Check]) -> Generator[Result, None, None]:
    """Yield the result of each check when it ends; several processes run at a time.

    Args:
        checks: the checks; those with `is_alone` run when all others are done.
    """
    with tempfile.TemporaryDirectory(prefix="torch-fp8-", ignore_cleanup_errors=True) as folder:
        for is_alone in (False, True):
            waiting = [check for check in checks if check.is_alone == is_alone]
            most = 1 if is_alone else _at_a_time()
            running: list[_Process] = []
            try:
                while waiting or running:
                    ended = [process for process in running if process.has_ended()]
                    for process in ended:
                        running.remove(process)
                        yield process.result()
                    if waiting and len(running) < most:
                        check = waiting.pop(0)
                        reason = check.not_run or _start(check, folder, running)
                        if reason:
                            status = NOT_RUN if check.not_run else FAILED
                            yield Result(check.section, check.name, status, reason)
                    elif not ended:
                        time.sleep(_POLL_S)
            finally:
                for process in running:
                    process.kill()


def _start(check: Check, folder: str, running: list["_Process"]) -> str:
    """Add a check's process to those running; return why it cannot start, or an empty text."""
    try:
        running.append(_Process(check, Path(tempfile.mkdtemp(dir=folder))))
    except Exception as error:  # for example no memory for another process
        return last_line(error)
    return ""


class _Process:
    """The process of a check, with a folder of its own."""

    def __init__(self, check: Check, folder: Path) -> None:
        self._check, self._answer, self._log = check, folder / "answer.json", folder / "log"
        self._began = time.monotonic()
        request = json.dumps([check.function, check.arguments, check.limit_s, str(self._answer)])
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch_fp8.environment.worker", request],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment(folder, check),
                start_new_session=True,  # so that it can be killed with its children
            )

    def has_ended(self) -> bool:
        """Return whether the process has ended, or has run for too long."""
        late = time.monotonic() - self._began > _START_LIMIT_S + self._check.limit_s
        return late or self._process.poll() is not None

    def kill(self) -> None:
        """Send SIGKILL to the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def result(self) -> Result:
        """End the process; any failure of it is a failure of the check."""
        self.kill()
        check, seconds = self._check, time.monotonic() - self._began
        text = self._log.read_text(errors="replace").strip()
        printed = f"\nwhat it printed:\n{text[-_LOG_CHARACTERS:]}" if text else ""
        with contextlib.suppress(OSError, ValueError):  # it was killed before it had answered
            fields = json.loads(self._answer.read_text())
            fields["log"] += printed if fields["status"] == FAILED else ""
            return Result(check.section, check.name, **fields)
        detail = _end(self._process.returncode)
        if seconds >= check.limit_s:
            detail = f"took more than {check.limit_s:.0f} s"
        return Result(check.section, check.name, FAILED, detail, seconds, printed)


def _at_a_time() -> int:
    """Return the number of simultaneous processes; compiling kernels needs a core each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(4, max(1, (cores or 1) // 2))


def _end(status: int) -> str:
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _environment(folder: Path, check: Check) -> dict[str, str]:
    if not check.sees_every_card and torch.cuda.device_count() > 1:  # a host would use all GPUs
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        cards = {"CUDA_VISIBLE_DEVICES": first}
    else:
        cards = {}
    inherited = {
        name: value
        for name, value in child_environment().items()
        if not name.startswith(_NOT_INHERITED)
    }
    return {
        "OMP_NUM_THREADS": "1",  # models are tiny, and idle threads spin
        "TOKENIZERS_PARALLELISM": "false",
        **inherited,
        **cards,
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),
    }
