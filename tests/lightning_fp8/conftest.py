"""Runs scripts that say nothing of FP8 but the flag, and counts the GEMMs that they ran."""

import json
import logging
import os
import subprocess
import tempfile
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.processes import free_port

TESTS = Path(__file__).parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 180


@dataclass
class Run:
    """A finished script: its exit status and output, and what each of its processes counted."""

    returncode: int
    output: str
    counts: list[dict[str, int]]

    @property
    def fp8_gemms(self) -> list[int]:
        """FP8 GEMMs per process, of those that ran any."""
        return [count["scaled_mm"] for count in self.counts if count["scaled_mm"]]


def run_script(python: str, folder: Path, command: list[str], env: dict[str, str]) -> Run:
    command = [str(SCRIPTS / part) if part.endswith(".py") else part for part in command]
    search = [str(TESTS / "probe"), os.environ.get("PYTHONPATH"), str(TESTS.parent)]
    process = subprocess.run(
        [python, *command],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, search)),
            "FP8_PROBE_OUT": str(folder),
            "MASTER_PORT": str(free_port()),  # launches at the same time must not meet at one
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    counts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return Run(process.returncode, process.stdout, counts)


@pytest.fixture
def run(tmp_path, forked_python, forked_hosts):
    """run(command, command, ...): the scripts, all at the same time.

    A command is a list of arguments, and perhaps a dictionary of environment variables. One that
    switches the autoload off, or names a package of Lightning's other copy, takes a Python that has
    imported no host before.
    """

    def start(command: list) -> Run:
        env = next((part for part in command if isinstance(part, dict)), {})
        other_copy = any("pytorch_lightning" in p or "lightning_fabric" in p for p in command)
        is_stock = "TORCH_DEVICE_BACKEND_AUTOLOAD" in env
        return run_script(
            forked_python if other_copy or is_stock else forked_hosts,
            Path(tempfile.mkdtemp(dir=tmp_path)),
            [part for part in command if isinstance(part, str)],
            env,
        )

    def run(*commands: list) -> list[Run]:
        with ThreadPoolExecutor(len(commands)) as pool:
            return list(pool.map(start, commands))

    return run


@pytest.fixture
def own_ranks():
    """Lightning leaves a process group, and the addresses of ranks in the environment."""
    with unittest.mock.patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def logged():
    """The messages that went through Lightning's own log.

    Where both copies are imported, one logs through the other's.
    """
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    names = ("lightning.fabric", "lightning_fabric", "lightning.pytorch", "pytorch_lightning")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
    yield messages
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture
def log(logged):
    """``log()``: what was logged, as one text."""
    return lambda: "\n".join(logged)
