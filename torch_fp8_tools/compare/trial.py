"""`Trial`: one run of the user's program, described in the file that ``TORCH_FP8_COMPARE`` names.

The command writes the file, and each process of the program reads it. Standard library only,
because a child reads it at the end of ``import torch``.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "TORCH_FP8_COMPARE"
"""The environment variable that names the file of a trial."""
FILE, LOG, PROCESSES, OUTPUTS = "trial.json", "output.log", "processes.txt", "outputs"
EXCEPTION = "exception.txt"
"""The file with the first exception that ended a process of a trial."""
WARM_UP, PROFILED = 3, 5
"""The first steps, which no median includes, and the number of profiled steps after them."""


@dataclass(frozen=True)
class Trial:
    """A run of the program in one variant, from one seed.

    Attributes:
        variant: name of the variant, as the user wrote it.
        folder: folder of the records, and of what the program writes.
        steps: number of optimizer steps after which it is stopped.
        seed: number of the seed; 0 leaves the seeds of the program as they are.
        options: fields of FP8Config that the variant sets, or None for BF16.
        fast_cpu: whether BF16 products are computed in float32.
        is_repeat: whether it repeats an earlier trial, to measure the noise.
    """

    variant: str
    folder: str
    steps: int
    seed: int = 0
    options: Mapping[str, Any] | None = field(default=None)
    fast_cpu: bool = False
    is_repeat: bool = False

    @property
    def is_bf16(self) -> bool:
        return self.options is None

    @property
    def profiled(self) -> range:
        """The optimizer steps that are profiled, of which there are none in a short run."""
        count = max(0, min(PROFILED, (self.steps - WARM_UP) // 3))
        return range(WARM_UP + 1, WARM_UP + 1 + count)

    def write(self) -> Path:
        """Write the file that `read_trial` reads, and return its path."""
        path = Path(self.folder) / FILE
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return path


def rank_of(path: Path) -> int:
    """Return the rank whose file this is."""
    return int(path.stem.removeprefix("rank"))


def read_trial(path: str) -> Trial:
    """Read a trial.

    Raises:
        OSError, ValueError, TypeError: the file is missing, or describes no trial.
    """
    return Trial(**json.loads(Path(path).read_text(encoding="utf-8")))
