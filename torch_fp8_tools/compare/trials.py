"""Runs the trials of a comparison one after the other, and ends all their processes."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch_fp8_tools.compare.trial import (
    EXCEPTION,
    FILE,
    LOG,
    PROCESSES,
    VARIABLE,
    Trial,
    rank_of,
)

RESULT, INTERRUPTED = "result.json", "interrupted"
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_GRACE_S, _POLL_S, _LINES = 10.0, 0.1, 20
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
Progress = Callable[[Trial, int, float | None], None]
"""A function of the trial, the step that it has reached, and the loss of that step."""


def run_trial(
    command: Sequence[str], trial: Trial, stall_s: float, progress: Progress
) -> dict[str, Any]:
    """Run a trial, unless it has been completed before, and return its result.

    Args:
        command: the user's command.
        trial: the trial.
        stall_s: seconds without an optimizer step after which it is ended.
        progress: called at new steps.
    Returns:
        ``status`` ("done" or "failed"), ``error``, ``tail`` (the last lines of the program) and
        ``seconds``.
    Raises:
        OSError: the command cannot be started.
    """
    folder = Path(trial.folder)
    earlier = _earlier(trial)
    if earlier is not None:
        return earlier
    if (folder / FILE).exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    path = trial.write()
    began = time.monotonic()
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            env=_environment(trial, path),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            stalled = _wait(process, trial, stall_s, progress)
        finally:
            end_processes(process, path)
    seconds = time.monotonic() - began
    result = {**_result(trial, process.returncode, stalled), "seconds": round(seconds, 2)}
    (folder / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def _earlier(trial: Trial) -> dict[str, Any] | None:
    """Return the result of a trial that an earlier call has completed."""
    folder = Path(trial.folder)
    with contextlib.suppress(OSError, ValueError, TypeError):
        same = json.loads((folder / FILE).read_text(encoding="utf-8")) == json.loads(
            json.dumps(asdict(trial))
        )
        result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        if same and result["status"] == "done":
            return result
    return None


def _environment(trial: Trial, path: Path) -> dict[str, str]:
    environment = {**os.environ, VARIABLE: str(path)}
    environment.setdefault("PYTHONHASHSEED", "0")
    # Find the programs next to this Python, because its virtual environment need not be active.
    folders = [str(Path(sys.executable).parent), environment.get("PATH", "")]
    environment["PATH"] = os.pathsep.join(filter(None, folders))
    config = environment.pop("TORCH_FP8_CONFIG", "")
    if trial.options is not None:
        from torch_fp8.quantization.options import read_json

        given = read_json(config) if config.strip() else {}
        environment["TORCH_FP8_CONFIG"] = json.dumps({**given, **trial.options})
    return environment


def _wait(
    process: subprocess.Popen[bytes], trial: Trial, stall_s: float, progress: Progress
) -> bool:
    """Wait for the end of the program; return whether it was ended because it took no steps."""
    path, position, last = Path(), 0, time.monotonic()
    ended: int | None = None
    while process.poll() is None:
        time.sleep(_POLL_S)
        lowest = min(Path(trial.folder).glob("rank*.jsonl"), key=rank_of, default=Path())
        path, position = (path, position) if path == lowest else (lowest, 0)
        text = ""
        with contextlib.suppress(OSError), path.open(encoding="utf-8") as file:
            file.seek(position)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        position += len(complete.encode())
        for line in complete.splitlines():
            values = json.loads(line)
            ended = values["pid"] if values.get("end") == "steps" else ended
            if "loss" in values:
                last = time.monotonic()
                progress(trial, values["step"], values["loss"])
        if ended is not None and time.monotonic() - last > _GRACE_S and not _is_alive(ended):
            return False  # the rank is gone, but the launcher is not
        if time.monotonic() - last > stall_s:
            return True
    return False


def _is_alive(pid: int) -> bool:
    """Return whether a process runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(Path(f"/proc/{pid}"))


def end_processes(process: subprocess.Popen[bytes], path: Path) -> None:
    """End the program and all that it has started, first by SIGTERM and then by SIGKILL.

    Launchers start their ranks in sessions of their own. Every process of a trial has the path of
    the trial in its environment, by which /proc finds them.
    """
    end = time.monotonic() + _GRACE_S
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    for pid in _processes_of(path):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    while _processes_of(path) and time.monotonic() < end:
        time.sleep(_POLL_S)
    _signal_group(process.pid, signal.SIGKILL)
    for pid in _processes_of(path):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _processes_of(path: Path) -> list[int]:
    """Return the processes whose environment names this trial; none where there is no /proc."""
    entry, pids = f"{VARIABLE}={path}".encode(), list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = entry in (folder / "environ").read_bytes().split(b"\0")
            if is_ours and not _is_zombie(folder):
                pids.append(int(folder.name))
    return pids


def _is_zombie(folder: Path) -> bool:
    """Return whether a process of /proc has ended, and its parent has not asked for its status."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


def _result(trial: Trial, status: int | None, stalled: bool) -> dict[str, Any]:
    """Return the result of a trial whose program has ended with an exit status."""
    folder = Path(trial.folder)
    ends, errors, steps = [], [], 0
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # cut off
                values = json.loads(line)
                ends += [values["end"]] if "end" in values else []
                errors += [values["error"]] if "error" in values else []
                steps = max(steps, values.get("step", 0)) if "loss" in values else steps
    error, tail = None, list[str]()
    if errors:
        error = errors[0]
    elif stalled:
        error = f"no optimizer step for a long time (--stall); {steps} before that"
    elif "steps" in ends:
        error = None
    elif status:
        error = f"exit status {status} after {steps} steps"
        tail = _tail(folder / EXCEPTION)
        error += f" ({tail[-1]})" if tail else ""
    elif not steps:
        error = _never_stepped(folder)
    tail = (tail or _tail(folder / LOG)) if error else []
    is_ours = bool(errors) or (error is not None and not steps and not status)
    status_text = "failed" if error else "done"
    return {"status": status_text, "error": error, "tail": tail, "not_comparable": is_ours}


def _tail(path: Path) -> list[str]:
    """Return the last lines of a file, which need not exist."""
    with contextlib.suppress(OSError):
        text = _COLOURS.sub("", path.read_text(encoding="utf-8", errors="replace"))
        return [line.rpartition("\r")[2] for line in text.splitlines()][-_LINES:]
    return []


def _never_stepped(folder: Path) -> str:
    if (folder / PROCESSES).exists():
        return (
            "it took no optimizer step. A comparison needs a command that trains, with an "
            "optimizer derived from torch.optim.Optimizer, in processes that get this environment "
            f"(workers of a running Ray cluster get {VARIABLE} through runtime_env)"
        )
    return (
        "none of its processes loaded torch-fp8 at the end of `import torch`. Run it with the "
        f"Python in which torch-fp8 is installed ({sys.executable}), with {_AUTOLOAD} not 0, and "
        f"let the launcher pass on {VARIABLE} (srun --export=ALL, mpirun -x {VARIABLE})"
    )


def trials_of(
    variants: Sequence[Any], folder: Path, steps: int, seeds: int, fast_cpu: bool, repeat: bool
) -> list[Trial]:
    """Return the trials in the order in which they run: BF16 and its repetition first."""
    trials = []
    for seed in range(seeds):
        for variant in variants:
            name = f"{variant.folder}-seed{seed}"
            trial = Trial(variant.name, str(folder / name), steps, seed, variant.options, fast_cpu)
            trials.append(trial)
            if repeat and not seed and variant.options is None:
                again = str(folder / f"{variant.folder}-again")
                short = max(2, steps // 4)
                trials.append(replace(trial, folder=again, steps=short, is_repeat=True))
    return trials
