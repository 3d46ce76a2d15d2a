"""Runs checks, each apart from the others and from this process.

A check that raises, hangs, or ends its process turns its own line red and no other. Processes and
temporary folders are gone when the last check is done, and when this process is interrupted.
"""

import contextlib
import itertools
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from torch_fp8.environment.check import ALONE, EVERY_CARD, Check
from torch_fp8.environment.hosts import child_environment
from torch_fp8.environment.result import FAILED, NOT_RUN, Result, last_line
from torch_fp8.environment.worker import READY

_START_LIMIT_S = 180.0
_LOG_CHARACTERS = 8000
# What a launcher or a scheduler has set is for the user's run, not for checks in one process.
_NOT_INHERITED = (
    *("ACCELERATE_", "FSDP_", "PL_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "TORCH_FP8_CONFIG"),
)


def run_checks(
    checks: Sequence[Check], begin: Callable[[str], None] = lambda name: None
) -> Generator[Result, None, None]:
    """Yield the result of each check as it ends; several processes work at a time.

    Args:
        checks: the checks; those of `Check.process` `ALONE` run when all others are done.
        begin: called with the name of each before it runs, from any thread.
    """
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(check.process, []).append(check)
    last = [groups.pop(ALONE)] if ALONE in groups else []
    with tempfile.TemporaryDirectory(prefix="torch-fp8-", ignore_cleanup_errors=True) as folder:
        for phase in (list(groups.values()), last):
            run = _Run(Path(folder), begin)
            with ThreadPoolExecutor(_at_a_time()) as pool:
                try:
                    for group in phase:
                        pool.submit(run.group, group)
                    for _ in itertools.chain(*phase):
                        yield run.results.get()
                finally:
                    run.stop()


class _Run:
    """Groups of checks in threads, which wait for their processes.

    Attributes:
        results: the results of the checks that have ended.
    """

    def __init__(self, folder: Path, begin: Callable[[str], None]) -> None:
        self.results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._folder, self._begin = folder, begin
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._is_over = False

    def group(self, checks: Sequence[Check]) -> None:
        """Run the checks of one process; another one follows a process that has ended."""
        worker: _Worker | None = None
        try:
            for check in checks:
                if self._is_over:
                    return
                self._begin(f"{check.section}: {check.name}")
                if check.not_run:
                    self.results.put(Result(check.section, check.name, NOT_RUN, check.not_run))
                    continue
                try:
                    if worker is None or worker.is_over:
                        self._close(worker)
                        worker = self._started(check.process)
                    result = worker.run(check)
                except Exception as error:  # no memory for another process
                    result = Result(check.section, check.name, FAILED, last_line(error))
                self.results.put(result)
        finally:
            self._close(worker)

    def stop(self) -> None:
        """Stop what still runs; the threads see that and return."""
        with self._lock:
            self._is_over = True
            for worker in self._workers:
                worker.kill()

    def _started(self, process: str) -> "_Worker":
        with self._lock:
            if self._is_over:
                raise InterruptedError("nothing more is started")
            worker = _Worker(process, self._folder)
            self._workers.add(worker)
            return worker

    def _close(self, worker: "_Worker | None") -> None:
        if worker is not None:
            worker.close()
            with self._lock:
                self._workers.discard(worker)


def _at_a_time() -> int:
    """Return how many processes work at a time: compiling kernels takes a core each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(4, max(1, (cores or 1) // 2))


class _Worker:
    """A process of `torch_fp8.environment.worker`.

    Attributes:
        name: the `Check.process` that it is for.
        is_over: it cannot run another check.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.is_over = name, False
        self._log = folder / f"{time.monotonic_ns()}.log"
        self._answers, theirs = os.pipe()
        self._received = b""
        command = [sys.executable, "-m", "torch_fp8.environment.worker", str(theirs)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                cwd=folder,
                env=_environment(folder, name),
                start_new_session=True,  # with all its children it can be ended at once
            )
        os.close(theirs)
        self._is_ready = False

    def run(self, check: Check) -> Result:
        """Run one check; a failure of the process is a failure of the check."""
        began, offset = time.monotonic(), self._log.stat().st_size
        try:
            if not self._is_ready:
                assert self._answer(_START_LIMIT_S) == READY
                self._is_ready = True
            request = {"function": check.function, "arguments": check.arguments}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._answer(check.limit_s)
        except TimeoutError as error:
            self._dump_stack()
            self.close(at_once=True)
            return self._failed(check, str(error), began, offset)
        except OSError:
            self.close()
            return self._failed(check, f"its process {self._end()}", began, offset)
        self.is_over = answer.pop("over")
        if answer["status"] == FAILED:
            answer["log"] += self._printed(offset)
        return Result(check.section, check.name, **answer)

    def close(self, at_once: bool = False) -> None:
        """End the process and all that it has started."""
        self.is_over = True
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        self.kill()
        self._process.wait()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def kill(self) -> None:
        """Send SIGKILL to the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, limit_s: float) -> Any:
        """Return the next line of JSON; ConnectionError where the process has ended."""
        end = time.monotonic() + limit_s
        while b"\n" not in self._received:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError(f"took more than {limit_s:.0f} s")
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise ConnectionError
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _dump_stack(self) -> None:
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)

    def _end(self) -> str:
        status = self._process.returncode
        if status is not None and status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def _failed(self, check: Check, detail: str, began: float, offset: int) -> Result:
        seconds = time.monotonic() - began
        log = self._printed(offset)
        return Result(check.section, check.name, FAILED, detail, seconds, log)

    def _printed(self, offset: int) -> str:
        with self._log.open("rb") as file:
            file.seek(offset)
            text = file.read().decode(errors="replace").strip()
        return f"\nwhat it printed:\n{text[-_LOG_CHARACTERS:]}" if text else ""


def _environment(folder: Path, process: str) -> dict[str, str]:
    if process != EVERY_CARD and torch.cuda.device_count() > 1:  # hosts would use all of them
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        cards = {"CUDA_VISIBLE_DEVICES": first}
    else:
        cards = {}
    kept = {
        name: value
        for name, value in child_environment().items()
        if not name.startswith(_NOT_INHERITED)
    }
    return {
        "OMP_NUM_THREADS": "1",  # tiny models; threads that wait would spin
        "TOKENIZERS_PARALLELISM": "false",
        **kept,
        **cards,
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),
    }
