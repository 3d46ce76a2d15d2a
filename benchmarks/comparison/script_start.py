"""What every script here does before it imports torch: threads, signals, fewer host warnings.

Standard library only, so that a signal or a mistake is answered at once and not after torch has
been imported.
"""

import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

STARTED = time.monotonic()
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HARMLESS_WARNINGS = (
    "`isinstance(treespec, LeafSpec)` is deprecated",  # Lightning's, of torch's own names
    "dataloader' does not have many workers",  # the data is in memory
    "gradient_checkpointing` is deprecated",  # TRL's own default, and its use of transformers
    "'pin_memory' argument is set as true but no accelerator is found",
)
HARMLESS_RECORDS = {  # logger -> what its records contain
    "torchao": ("Failed to load",),  # extensions for other cards and Pythons, none is used here
    "torch.utils._pytree": ("is an Enum subclass",),  # while torchao is imported
    "lightning.pytorch.utilities.rank_zero": ("Tip:", "TPU available", "GPU available: False"),
}


class Refusal(ValueError):
    """A mistake that whoever started the script can mend: told in one line, without a traceback."""


class Ended(SystemExit):
    """A signal ended the script, with status 128 + its number."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def begin(environment: dict[str, str] = os.environ) -> None:
    """Set what this process and its children start with. To be called before torch is imported."""
    for name, value in thread_settings(environment).items():
        environment[name] = value
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=f".*{re.escape(message)}")
    for name, parts in HARMLESS_RECORDS.items():
        logging.getLogger(name).addFilter(_without(parts))
    for signum in SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(signum, _end)
    if "ACCELERATE_MIXED_PRECISION" in environment:
        _watch(_launcher_is_gone)


def run(main: Callable[[], None]) -> None:
    """Run a script's main function; what it refuses and what ends it is one line on stderr."""
    script = Path(sys.argv[0]).name
    try:
        main()
    except Refusal as refusal:
        sys.exit(f"{script}: error: {refusal}")
    except Ended as ended:
        name = signal.Signals(ended.signum).name
        print(f"\n{script}: ended by {name}, exit status {ended.code}", file=sys.stderr)
        raise


def end_with_input() -> None:
    """End this process when its standard input ends: whoever holds the other end is gone."""
    _watch(lambda: os.read(0, 1) == b"")


def thread_settings(environment: dict[str, str]) -> dict[str, str]:
    """Return settings of OpenMP that hold up on a busy machine, where the user has set none.

    Threads that wait for one another spin by default. Where other programs want the same cores, a
    step takes many times as long: the thread that the others wait for is not the one that runs. So
    threads sleep while they wait, and there are no more of them than cores that are idle now.
    """
    settings = {}
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & environment.keys():
        settings["OMP_WAIT_POLICY"] = "PASSIVE"
    if "OMP_NUM_THREADS" not in environment:
        cores, idle = _usable_cores(), idle_cores()
        if idle is not None and idle < cores - 0.5:
            settings["OMP_NUM_THREADS"] = str(max(1, round(idle)))
    return settings


def idle_cores(seconds: float = 0.5) -> float | None:
    """Return how many of the cores that this process may use were idle; None: not known here."""
    try:
        before = _idle_ticks()
        time.sleep(seconds)
        after = _idle_ticks()
    except OSError:  # no /proc
        return None
    ticks = seconds * os.sysconf("SC_CLK_TCK")
    return sum(min(1.0, (after[core] - before[core]) / ticks) for core in before)


def _idle_ticks() -> dict[str, int]:
    usable = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    return {fields[0]: int(fields[4]) for fields in lines if fields[0] in usable}


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    for other in SIGNALS:
        if signal.getsignal(other) != signal.SIG_IGN:
            signal.signal(other, signal.SIG_DFL)  # a second one does not wait
    raise Ended(signum)


def _watch(is_gone: Callable[[], bool]) -> None:
    def wait() -> None:
        if is_gone():
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end with the parent", daemon=True).start()


def _launcher_is_gone() -> bool:
    """Wait until the launcher, which does not pass signals on, has ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    return True


def _without(parts: tuple[str, ...]) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not any(part in record.getMessage() for part in parts)
