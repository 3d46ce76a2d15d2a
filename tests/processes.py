"""Runs programs in processes of their own."""

import os
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

Done = subprocess.CompletedProcess[str]


def ran(
    *command: object,
    cwd: Path | None = None,
    env: Mapping[str, str] = os.environ,
    fails: bool = False,
    input: str | None = None,
    **variables: str,
) -> Done:
    """Run a program, whose code may be indented, with variables beside `env`; it must succeed."""
    done = subprocess.run(
        [dedent(str(word)) for word in command],
        cwd=cwd,
        env={**env, "OMP_NUM_THREADS": "1", **variables},
        input=input,
        capture_output=True,
        text=True,
        timeout=920,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def side_by_side(
    commands: Iterable[tuple[Sequence[object], Mapping[str, str]]], cwd: Path | None = None
) -> list[str]:
    """Run programs with their variables at the same time; all must succeed."""
    processes = [
        subprocess.Popen(
            list(map(str, command)),
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, variables in commands
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), printed
    return printed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
