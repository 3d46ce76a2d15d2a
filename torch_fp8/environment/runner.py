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
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from torch_fp8.environment.check import Check
from torch_fp8.environment.hosts import child_environment
from torch_fp8.environment.result import FAILED, NOT_RUN, Result, last_line

_START_LIMIT_S = 180.0
_LOG_CHARACTERS = 8000
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
            processes = _Processes(Path(folder))
            with ThreadPoolExecutor(1 if is_alone else _at_a_time()) as pool:
                try:
                    phase = [check for check in checks if check.is_alone == is_alone]
                    futures = [pool.submit(processes.result, check) for check in phase]
                    for future in as_completed(futures):
                        yield future.result()
                finally:
                    pool.shutdown(wait=False, cancel_futures=True)
                    processes.stop()


class _Processes:
    """The processes of checks that run at the same time, each waited for by a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_over = False

    def result(self, check: Check) -> Result:
        """Run a check; any failure of its process is a failure of the check."""
        if check.not_run:
            return Result(check.section, check.name, NOT_RUN, check.not_run)
        try:
            return self._run(check, Path(tempfile.mkdtemp(dir=self._folder)))
        except Exception as error:  # for example no memory for another process
            return Result(check.section, check.name, FAILED, last_line(error))

    def stop(self) -> None:
        """End the running processes, and start no more."""
        with self._lock:
            self._is_over = True
            for process in self._running:
                _kill(process)

    def _run(self, check: Check, folder: Path) -> Result:
        answer, log = folder / "answer.json", folder / "log"
        began = time.monotonic()
        process = self._started(check, folder, answer, log)
        try:
            process.wait(_START_LIMIT_S + check.limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill(process)  # and its children
            process.wait()
            with self._lock:
                self._running.discard(process)
        seconds = time.monotonic() - began
        text = log.read_text(errors="replace").strip()
        printed = f"\nwhat it printed:\n{text[-_LOG_CHARACTERS:]}" if text else ""
        if answer.is_file():
            fields = json.loads(answer.read_text())
            fields["log"] += printed if fields["status"] == FAILED else ""
            return Result(check.section, check.name, **fields)
        detail = _end(process.returncode)
        if seconds >= check.limit_s:
            detail = f"took more than {check.limit_s:.0f} s"
        return Result(check.section, check.name, FAILED, detail, seconds, printed)

    def _started(
        self, check: Check, folder: Path, answer: Path, log: Path
    ) -> subprocess.Popen[bytes]:
        request = json.dumps([check.function, check.arguments, check.limit_s, str(answer)])
        with self._lock, log.open("wb") as output:
            if self._is_over:
                raise InterruptedError("nothing more is started")
            process = subprocess.Popen(
                [sys.executable, "-m", "torch_fp8.environment.worker", request],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment(folder, check),
                start_new_session=True,  # so that it can be killed with its children
            )
            self._running.add(process)
        return process


def _at_a_time() -> int:
    """Return the number of simultaneous processes; compiling kernels needs a core each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(4, max(1, (cores or 1) // 2))


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGKILL to the process and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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
