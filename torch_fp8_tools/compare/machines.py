"""Machines of a comparison: it runs once in front of a launcher, or on each of several machines.

Launchers that start all ranks themselves (``srun``, ``mpirun``) run behind the command. Those that
are started on each machine (``torchrun --nnodes 2``) run behind a command on each machine.
"""

import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

_COUNT = re.compile(r"--(?:nnodes|num[_-]machines)(?:=(.+))?$")
_NUMBER = re.compile(r"--(?:node|machine)[_-]rank(?:=(.+))?$")
QUEUES = {
    "sbatch": "it only queues a script. Call torch-fp8 compare in that script, in front of srun",
    "salloc": "its session has the cards. Call torch-fp8 compare in it, in front of srun",
    "ray": "the cluster does not get this environment. Submit the comparison: ray job submit -- "
    "torch-fp8 compare -- python train.py",
    "sky": "other machines run the task. Call torch-fp8 compare in the task's run: section",
}
"""Commands that hand a program on to processes without our environment, and what to do."""
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")


def machine(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return a name for this machine, if the command runs on each of several machines.

    Args:
        command: the user's command, which starts the ranks of one machine or of all.
        environment: environment variables.
    Returns:
        ``machine-`` and its number, or its host name, or None if the command starts all ranks.
    Raises:
        ValueError: the command only queues a program, or torch-fp8 compare itself runs once for
            each rank.
    """
    name = Path(command[0]).name
    if name in QUEUES:
        raise ValueError(f"{name} starts no process of this comparison: {QUEUES[name]}")
    count = _value(command, _COUNT)
    if count not in (None, "1", "1:1"):
        return f"machine-{_value(command, _NUMBER) or socket.gethostname()}"
    for variable in _TASKS:
        tasks = environment.get(variable, "")
        if tasks.isdecimal() and int(tasks) > 1:
            raise ValueError(
                f"torch-fp8 compare runs in each of {tasks} processes ({variable}={tasks}). Put it "
                "in front of the launcher: torch-fp8 compare -- srun python train.py"
            )
    return None


def _value(command: Sequence[str], pattern: re.Pattern[str]) -> str | None:
    """Return the value of the first option that matches, after ``=`` or as the next word."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if option := pattern.match(word):
            return option[1] or following
    return None
