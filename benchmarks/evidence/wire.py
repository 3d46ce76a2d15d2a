"""Error of a gradient averaged over ranks, by how it travels, against the mean in float32, as CSV.

    python -m benchmarks.evidence.wire       # from the repository's root; runs/benchmarks/wire.csv

2, 4 and 8 processes on the CPU with gloo, each with a Gaussian gradient (1024, 1024) of its own; in
``spread``, rows grow from 2^-8 to 2^8. Independent gradients are the hard case: their mean is
smaller than each of them by sqrt(N), and so are the roundings of the first phase.

* ``sqnr_db``, ``worst_row_sqnr_db``: of the average, over all of it and in the worst of its rows.
* ``of_float32``, ``of_bf16``: bytes that a rank sends, against an all-reduce in that dtype.

``fp8`` is what runs at O1 and O2, ``fp8, O3`` what runs at O3, where both roundings are stochastic.
``bf16`` is torch's ``bf16_compress_hook``. ``fp8 sum`` sums in E4M3, one scale for the tensor, with
room for the sum: what an all-reduce of FP8 would do. ``fp8-lm`` is that sum by FP8-LM's rule, in
the first step, where mu is 1 / sqrt(N).
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measurement import environment, print_table
from benchmarks.rows import add_csv, write_rows
from tests.comm_counter import count_communication
from torch_fp8 import FP8Config
from torch_fp8.distributed.collectives import all_gather, all_to_all
from torch_fp8.distributed.ddp.fp8_grad_bucket import GradientBucket
from torch_fp8.distributed.ddp.wrap import connect_ddp
from torch_fp8.ops.grad_codec import Rounding
from torch_fp8.quantization.formats import E4M3
from torch_fp8.quantization.metrics import sqnr_db, worst_row_sqnr_db
from torch_fp8.tensor.float8_grad import Float8Grad

SHAPE = ROWS, COLS = 1024, 1024
RANKS = (2, 4, 8)
INPUTS = {
    "rows alike": torch.ones(ROWS, 1),
    "rows spread": 2.0 ** torch.linspace(-8, 8, ROWS)[:, None],
}
COLUMNS = (
    "method",
    "ranks",
    "input",
    "sqnr_db",
    "worst_row_sqnr_db",
    "of_float32",
    "of_bf16",
)
ORIGIN = ("torch", "commit", "date", "command")


class _Given(nn.Module):
    """A module with a weight whose gradient is `gradient`."""

    def __init__(self, gradient: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(gradient))
        self.gradient = gradient

    def forward(self) -> Tensor:
        return (self.weight * self.gradient).sum()


def o1(gradient: Tensor) -> Tensor:
    """Average as levels O1 and O2 do, by the communication hook of DDP."""
    module = _Given(gradient)
    ddp = DistributedDataParallel(module, init_sync=False)
    connect_ddp(ddp, [], FP8Config(opt_level="O1"))
    ddp().backward()
    assert module.weight.grad is not None
    return module.weight.grad


def o3(gradient: Tensor) -> Tensor:
    """Average as level O3 does: round stochastically on each rank and on the rank that averages."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = Float8Grad.quantize(gradient, Rounding(rank=dist.get_rank()))
    bucket = GradientBucket([weight], dist.group.WORLD)
    bucket.gather()
    bucket.finish()
    return weight.grad.dequantize()


def bf16(gradient: Tensor) -> Tensor:
    """Average as ``bf16_compress_hook`` does, which torch refuses on the CPU."""
    compressed = gradient.bfloat16().div_(dist.get_world_size())
    dist.all_reduce(compressed)
    return compressed.float()


def fp8_sum(gradient: Tensor) -> Tensor:
    """Sum codes of E4M3 with one scale, one rank after the other, in E4M3."""
    ranks = dist.get_world_size()
    amax = gradient.abs().amax()
    dist.all_reduce(amax, dist.ReduceOp.MAX)
    scale = amax * ranks / E4M3.max
    codes = (gradient / scale).to(E4M3.dtype).view(torch.uint8)
    every = [torch.empty_like(codes) for _ in range(ranks)]
    dist.all_gather(every, codes)
    total, *others = (other.view(E4M3.dtype).float() for other in every)
    for other in others:
        total = (total + other).to(E4M3.dtype).float()
    return total * (scale / ranks)


def fp8_lm(gradient: Tensor) -> Tensor:
    """Average as FP8-LM does in the first step (arXiv 2310.18313, section 2.1).

    All ranks share the smallest ``448 / amax`` of a tensor, times mu, which leaves room for the
    sum. The sum is rounded to E4M3 after each addition, as in a ring of an 8-bit all-reduce.
    """
    ranks = dist.get_world_size()
    factor = (E4M3.max / gradient.abs().amax()).reshape(1)
    dist.all_reduce(factor, dist.ReduceOp.MIN)
    factor *= ranks**-0.5
    parts = _to_e4m3(gradient.flatten() * factor).view(ranks, -1)
    received = torch.empty_like(parts)
    all_to_all(received, parts, dist.group.WORLD)
    total, *others = received
    for other in others:
        total = _to_e4m3(_from_e4m3(total) + _from_e4m3(other))
    all_gather(received, total, dist.group.WORLD)
    return (_from_e4m3(received) * (1 / factor / ranks)).view(gradient.shape)


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).view(torch.uint8)


def _from_e4m3(codes: Tensor) -> Tensor:
    return codes.view(E4M3.dtype).float()


METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": o1,
    "fp8, O3": o3,
    "fp8-lm": fp8_lm,
    "bf16": bf16,
    "fp8 sum": fp8_sum,
}
COUNTED = (
    "fp8",
    "fp8, O3",
    "fp8-lm",
    "bf16",
)  # the sum's collectives here are not those of an all-reduce


def measure(rank: int, ranks: int, store: str, results: Path) -> None:
    """Run every method on every input in one process; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = []
    for name, size in INPUTS.items():
        gradients = [
            torch.randn(SHAPE, generator=torch.Generator().manual_seed(r)) * size
            for r in range(ranks)
        ]
        exact = torch.stack(gradients).double().mean(0)
        for method, average in METHODS.items():
            with count_communication() as count:
                got = average(gradients[rank])
            if rank:
                continue
            in_float32 = 2 * (ranks - 1) / ranks * 4 * exact.numel()
            sent = count.bytes_sent / in_float32 if method in COUNTED else None
            rows.append(
                {
                    "method": method,
                    "ranks": ranks,
                    "input": name,
                    "sqnr_db": f"{sqnr_db(exact, got):.1f}",
                    "worst_row_sqnr_db": f"{worst_row_sqnr_db(exact, got):.1f}",
                    "of_float32": "" if sent is None else f"{sent:.3f}",
                    "of_bf16": "" if sent is None else f"{2 * sent:.3f}",
                }
            )
    if rank == 0:
        results.write_text(json.dumps(rows))
    dist.barrier()
    # Past the interpreter's teardown, in which gloo's threads and DDP's buckets can deadlock.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    add_csv(parser, "wire")
    arguments = parser.parse_args()
    here = environment(torch.device("cpu")) | {"command": "python -m benchmarks.evidence.wire"}
    rows: list[dict[str, object]] = []
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            store, results = f"{folder}/store", Path(folder, "rows")
            torch.multiprocessing.spawn(measure, (ranks, store, results), nprocs=ranks)
            rows += [row | {k: here[k] for k in ORIGIN} for row in json.loads(results.read_text())]
        write_rows(arguments.csv, (*COLUMNS, *ORIGIN), rows)
    print_table(COLUMNS, rows)


if __name__ == "__main__":
    main()
