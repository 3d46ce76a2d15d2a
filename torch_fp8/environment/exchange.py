"""A check in which two processes average a model's gradients in FP8, over NCCL or gloo."""

import copy
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from torch_fp8.config import FP8Config
from torch_fp8.conversion.convert import convert_to_float8
from torch_fp8.distributed.ddp.wrap import connect_ddp, ddp_options
from torch_fp8.environment.result import NotRun
from torch_fp8.quantization.metrics import sqnr_db

RANKS = 2
FLOOR_DB = 35.0
"""The minimum SQNR in dB; two roundings in the format of gradients keep 36.2 dB of Gaussian values
(benchmarks/results/wire.csv).
"""
_LIMIT_S = 100


def check_exchange() -> str:
    """Run both processes and return the SQNR of the average."""
    if not dist.is_available():
        raise NotRun("this torch was built without torch.distributed")
    has_cards = dist.is_nccl_available() and torch.cuda.device_count() >= RANKS
    backend = "nccl" if has_cards else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (folder, backend), nprocs=RANKS)
        detail = Path(folder, "verdict").read_text()
    return f"{detail}, {RANKS} processes over {backend}"


def verdict(averages: list[Tensor], gradients: list[Tensor]) -> str:
    """Raise unless all ranks have the same average, as exact as 8 bits allow.

    Args:
        averages: the average on each rank.
        gradients: the gradient of each rank.
    """
    if any(not torch.equal(average, averages[0]) for average in averages):
        raise RuntimeError("the ranks got different averages")
    decibels = sqnr_db(torch.stack(gradients).double().mean(0), averages[0])
    if not decibels >= FLOOR_DB:
        raise RuntimeError(
            f"the average reaches {decibels:.1f} dB, below its floor of {FLOOR_DB:.1f} dB"
        )
    return f"average of gradients {decibels:.1f} dB, equal on all ranks"


def _rank(rank: int, folder: str, backend: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(device)
        config = FP8Config(recipe="tensorwise", opt_level="O1", emulate=True)
        convert_to_float8(model, config)
        alone = copy.deepcopy(model)
        ddp = DistributedDataParallel(model, **ddp_options(model, []))
        connect_ddp(ddp, [], config)
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank)).to(device)
        alone(x).square().sum().backward()
        ddp(x).square().sum().backward()
        averages, gradients = _gathered(model), _gathered(alone)
        detail = verdict(averages, gradients)
        if rank == 0:
            Path(folder, "verdict").write_text(detail)
    finally:
        dist.destroy_process_group()


def _gathered(model: nn.Module) -> list[Tensor]:
    """Gather the gradients of each rank's model; returns one tensor for each rank."""
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    mine = torch.cat(parts)
    everyones = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(everyones, mine)
    return everyones
