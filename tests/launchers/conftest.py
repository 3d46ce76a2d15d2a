"""Starts launchers side by side, each with an environment of its own, as on several machines."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
INHERITED_NOT = ("ACCELERATE_", "TORCH_FP8_", "TORCHELASTIC_", "SLURM_", "MASTER_", "RANK", "WORLD")


def _environment(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(INHERITED_NOT)}
    return {
        **inherited,
        "HF_HOME": str(folder / "hf_home"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        **variables,
    }


@pytest.fixture
def start(tmp_path: Path, forked_hosts: str):
    """``start("module", "argument", ..., name="value")``: ``python -m module argument ...``, or a
    script by its path, with these environment variables and in a process group of its own; its
    output is in ``.log``.
    """
    processes = []

    def run(*words: object, **variables: str) -> subprocess.Popen:
        module = [] if isinstance(words[0], Path) else ["-m"]
        log = tmp_path / f"{len(processes)}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [forked_hosts, *module, *map(str, words)],
                cwd=tmp_path,
                env=_environment(tmp_path, variables),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.log = log
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def outputs(start: Callable) -> Callable[..., list[str]]:
    """``outputs(command, command, ...)``: starts all, waits, and returns what each printed.

    A command is the words of `start`, and perhaps a dictionary of environment variables.
    """

    def run(*commands: list) -> list[str]:
        started = []
        for command in commands:
            variables = next((part for part in command if isinstance(part, dict)), {})
            words = [part for part in command if not isinstance(part, dict)]
            started.append(start(*words, **variables))
        codes = [process.wait(timeout=240) for process in started]
        texts = [process.log.read_text() for process in started]
        assert codes == [0] * len(codes), "\n".join(texts)
        return texts

    return run


def losses(texts: list[str]) -> dict[str, list[str]]:
    """Rank -> the losses that it printed, exactly."""
    lines = [line.split() for text in texts for line in text.splitlines()]
    found = {line[1]: line[3:] for line in lines if line[:1] + line[2:3] == ["rank", "losses"]}
    assert found, "\n".join(texts)
    return found
