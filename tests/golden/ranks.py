"""Two ranks of DDP and of FSDP2 at O2 and O3, in two processes that gloo connects.

``python -m tests.golden.ranks <rank> <folder>`` is one of them; `recorded_on_ranks` starts
both and returns what they have noted. Each rank has batches of its own.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.golden.training import SAVED_AFTER, STEPS, Run, adamw, digests, leave_groups, llama
from tests.processes import side_by_side
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import connect_ddp, connect_fsdp, ddp_options, split_sharded

RANKS = 2
LEVELS = ("O2", "O3")
NAMES = [f"{how} {level} rank {r}" for how in ("DDP", "FSDP2") for level in LEVELS for r in (0, 1)]


class OfDDP(Run):
    def __init__(self, level: str, seed: int) -> None:
        model, config = llama(seed), FP8Config(recipe="tensorwise", opt_level=level)
        optimizer = adamw(model)
        convert_to_float8(model, config)
        leave_groups(model)
        convert_optimizer(optimizer, config, model=model)
        ddp = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
        connect_ddp(ddp, [optimizer], config)
        super().__init__(ddp, optimizer)
        self.rank = dist.get_rank()

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.module.no_sync():
            yield

    def state(self) -> dict[str, Any]:
        return {"model": self.module.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, folder: Path) -> dict[str, Any]:
        """The state as it is now; each rank keeps it, as if it had read rank 0's file."""
        self.file = io.BytesIO()
        torch.save(self.state(), self.file)
        return self.state()

    def load(self, folder: Path, saved: "OfDDP") -> None:
        saved.file.seek(0)
        state = torch.load(saved.file, weights_only=True)
        self.module.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class OfFSDP(Run):
    def __init__(self, level: str, seed: int) -> None:
        model, config = llama(seed), FP8Config(recipe="tensorwise", opt_level=level)
        convert_to_float8(model, config)
        leave_groups(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (RANKS,)), "mp_policy": policy}
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        optimizer: Optimizer = adamw(model)
        split_sharded(model, [optimizer], config)
        connect_fsdp(model, config)
        super().__init__(model, optimizer)
        self.rank = dist.get_rank()

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.module.set_requires_gradient_sync(last)
        yield

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> dict[str, Any]:
        state = self.state()
        dcp.save(state, checkpoint_id=folder)
        return state

    def load(self, folder: Path, saved: "OfFSDP") -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def recorded(kind: type[OfDDP] | type[OfFSDP], level: str, folder: Path) -> dict[str, Any]:
    """As `tests.golden.cases.recorded`."""
    run: Any = kind(level, seed=0)
    noted = run.train(range(1, SAVED_AFTER + 1))
    state = run.save(folder)
    made: dict[str, Any] = {"checkpoint": {name: digests(part) for name, part in state.items()}}
    rest = run.train(range(SAVED_AFTER + 1, STEPS + 1))
    made |= {name: values + rest[name] for name, values in noted.items()}
    fresh: Any = kind(level, seed=1)
    fresh.load(folder, run)
    made["resumed"] = fresh.train(range(SAVED_AFTER + 1, STEPS + 1))
    made["end"] = {name: digests(part) for name, part in run.state().items()}
    return made


def recorded_on_ranks(python: str = sys.executable) -> dict[str, Any]:
    """What both ranks note, by the names in `NAMES`, each started by `python`."""
    root = Path(__file__).parents[2]
    command = [python, "-W", "ignore", "-m", "tests.golden.ranks"]
    with tempfile.TemporaryDirectory() as folder:
        side_by_side((([*command, rank, folder], {}) for rank in range(RANKS)), cwd=root)
        parts = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: value for part in parts for name, value in part.items()}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    kinds: dict[str, type[OfDDP] | type[OfFSDP]] = {"DDP": OfDDP, "FSDP2": OfFSDP}
    made = {
        f"{name} {level} rank {rank}": recorded(kind, level, folder / f"{name} {level}")
        for name, kind in kinds.items()
        for level in LEVELS
    }
    (folder / f"{rank}.json").write_text(json.dumps(made))
    sys.stdout.flush()
    os._exit(0)  # gloo may hang at exit


if __name__ == "__main__":
    main()
