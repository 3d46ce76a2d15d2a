"""Step counts of optimizers with sharded weights, in folders of torch.distributed.checkpoint.

The count of a `SplitOptimizer` keys the rounding of its weights, so a resumed run needs it to use
the same random numbers. A folder stores it in the optimizer's parameter groups, as
``<optimizer>.param_groups.<i>.fp8_steps``. A load only reads the keys that the optimizer has before
its first step. The count is not among them, so folders of stock optimizers load, too.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.optim import Optimizer

from torch_fp8.optim.split_optimizer import STEPS, SplitOptimizer

_KEY = re.compile(rf"(?:^|(?P<optimizer>.*)\.)param_groups\.\d+\.{STEPS}$")


def adopt_steps(path: str | Path, optimizers: Iterable[Optimizer]) -> int:
    """Give optimizers the step counts that a folder of shards has.

    Args:
        path: a folder written by torch.distributed.checkpoint, or a folder that contains such
            folders, as Accelerate's; a file changes nothing.
        optimizers: the optimizers in the order in which they were saved; only those that keep their
            own states have a count.
    Returns:
        The number of optimizers with a count.
    """
    counts = list(_counts(Path(path)).values())
    split = [optimizer for optimizer in optimizers if isinstance(optimizer, SplitOptimizer)]
    for optimizer, count in zip(split, counts, strict=False):
        optimizer.fp8_steps = count
    return min(len(counts), len(split))


def _counts(path: Path) -> dict[tuple[str, str], int]:
    """Return the count of each optimizer in a folder, in the order of their names."""
    parts = [path, *sorted(path.glob("*"))] if path.is_dir() else []
    counts: dict[tuple[str, str], int] = {}
    for part in parts:
        if not (part / ".metadata").is_file():
            continue
        reader = dcp.FileSystemReader(part)
        keys = sorted(reader.read_metadata().state_dict_metadata)
        zero = torch.zeros(1, device="cpu", dtype=torch.int64)
        wanted = {key: zero.clone() for key in keys if _KEY.search(key)}
        if wanted:
            dcp.load(wanted, storage_reader=reader)
        for key, count in wanted.items():
            match = _KEY.search(key)
            assert match is not None
            counts[str(part), match["optimizer"] or ""] = int(count)
    return counts
