"""Settings, signals and mistakes of a script, before it imports torch. Standard library only."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

STARTED = time.monotonic()
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Refusal(ValueError):
    """A mistake of the user: `run` prints it in one line, without a traceback."""


def begin(environment: dict[str, str] = os.environ) -> None:
    """Set threads of this process and its children, and end it in order at a signal."""
    environment.update(thread_settings(environment))
    for signum in SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(signum, _end)


def run(main: Callable[[], None]) -> None:
    """Run a script's main function; a `Refusal` becomes one line and exit status 1."""
    try:
        main()
    except Refusal as refusal:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {refusal}")


def thread_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the setting with which OpenMP's threads sleep while they wait, if it is not set.

    By default they spin: on a busy machine they then take the core of the thread for which they
    wait, and a step takes many times as long.
    """
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & environment.keys():
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    for other in SIGNALS:
        if signal.getsignal(other) != signal.SIG_IGN:
            signal.signal(other, signal.SIG_DFL)  # a second one does not wait
    raise SystemExit(128 + signum)
