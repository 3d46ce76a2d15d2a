"""FP8-LM's all-reduce on one of four gloo ranks; what each case returns is written as JSON.

Started by test_fp8_lm.py: ``python fp8_lm_cases.py <rank> <ranks> <store> <result>``.
"""

import copy
import json
import os
import sys
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    count_communication,
    load_scaling_state_dict,
    scaling_state_dict,
)
from torch_fp8.distributed.ddp.comm_hook import QuantizedAllReduce, average_bucket
from torch_fp8.distributed.ddp.fp8_lm import (
    AutomaticScaling,
    SharedScaleAllReduce,
    automatic_scaling,
)
from torch_fp8.distributed.ddp.wrap import connect_ddp, ddp_options
from torch_fp8.quantization.metrics import sqnr_db, worst_row_sqnr_db

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])
FP8 = torch.float8_e4m3fn


class Weights(nn.Module):
    """Parameters (64, 80), (96, 64), (70,), (8, 8); the forward is given their gradients."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        shapes = [(64, 80), (96, 64), (70,), (8, 8)]
        made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        self.weights = nn.ParameterList(made)

    def forward(self, gradients):
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def gradients_of(rank, seed=0, dtype=torch.float32):
    """Rows of different size, and ranks of different size."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    made = []
    for weight in Weights().weights:
        rows = torch.exp2(torch.randint(-4, 5, (len(weight),), generator=generator).float())
        rows = rows.view(-1, *[1] * (weight.ndim - 1)) * 2.0**-rank
        made.append((torch.randn(weight.shape, generator=generator) * rows).to(dtype))
    return made


def wrapped(mu=None, dtype=torch.float32, **options):
    ddp = DistributedDataParallel(Weights(dtype), **options)
    scaling = AutomaticScaling(None if mu is None else torch.tensor(mu))
    ddp.register_comm_hook(SharedScaleAllReduce(dist.group.WORLD, scaling), average_bucket)
    return ddp, scaling


def averages(ddp, gradients):
    ddp.zero_grad()
    ddp(gradients).backward()
    return [weight.grad.clone() for weight in ddp.module.weights]


def to_fp8(x):
    return x.clamp(-448, 448).to(FP8)


def expected(of_ranks, mu):
    """The paper's rule, written down again: matrices first, then what travels as BF16."""
    made = []
    for i in range(2):
        grads = [gradients[i] for gradients in of_ranks]
        s = min(448 / g.abs().max() for g in grads)
        total = to_fp8(grads[0] * (mu * s))
        for g in grads[1:]:
            total = to_fp8(total.float() + to_fp8(g * (mu * s)).float())
        made.append(total.float() / (WORLD * mu * s))
    for i in (2, 3):
        grads = [gradients[i].bfloat16().float() for gradients in of_ranks]
        made.append((sum(grads) / WORLD).bfloat16().float())
    return made


def equal_on_ranks(tensors):
    for tensor in tensors:
        every = [torch.empty_like(tensor) for _ in range(WORLD)]
        dist.all_gather(every, tensor.contiguous())
        if not all(torch.equal(every[0].nan_to_num(9), t.nan_to_num(9)) for t in every):
            return False
    return True


def distance(ours, theirs):
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)
    )


def case_rule():
    """In one bucket, and in one for each."""
    made = {}
    for cap in (25, 1e-6):
        ddp, _ = wrapped(0.25, bucket_cap_mb=cap)
        for seed in range(2):  # the first backward finds the buckets' order
            ours = averages(ddp, gradients_of(RANK, seed))
            ddp_mu = 0.25 if seed == 0 else 0.25 * 2 ** (1 / 1000)
            theirs = expected([gradients_of(rank, seed) for rank in range(WORLD)], ddp_mu)
            made[f"{cap} {seed}"] = [distance(ours, theirs), equal_on_ranks(ours)]
    return made


def case_bfloat16():
    ddp, _ = wrapped(0.25, torch.bfloat16)
    ours = averages(ddp, gradients_of(RANK, dtype=torch.bfloat16))
    of_ranks = [gradients_of(rank, dtype=torch.bfloat16) for rank in range(WORLD)]
    theirs = expected([[g.float() for g in gradients] for gradients in of_ranks], 0.25)
    return distance([o.float() for o in ours], theirs), equal_on_ranks([o.float() for o in ours])


def case_scaling():
    """The same gradient everywhere: its largest values add up to 4 times as much."""
    ddp, scaling = wrapped()
    made = []
    for _ in range(4):
        ours = averages(ddp, gradients_of(0))
        error = distance(ours[:2], gradients_of(0)[:2])
        made.append([scaling.mu.item(), error])
    return made


def case_growth():
    """Of one rank alone, whose values do not reach the maximum."""
    ddp, scaling = wrapped(0.5)
    zeros = [torch.zeros_like(g) for g in gradients_of(0)]
    made = []
    for _ in range(3):
        averages(ddp, gradients_of(0) if RANK == 0 else zeros)
        made.append(scaling.mu.item())
    return made


def case_zeros():
    ddp, _ = wrapped()
    return [float(g.abs().max()) for g in averages(ddp, [g * 0 for g in gradients_of(RANK)])]


def case_tiny():
    """The smallest gradients there are: no scale overflows."""
    ddp, _ = wrapped(1.0)
    tiny = [torch.full_like(g, 2.0**-140 if RANK == 0 else 0.0) for g in gradients_of(RANK)]
    ours = averages(ddp, tiny)
    return [bool(g.isfinite().all()) for g in ours]


def case_not_finite():
    """In one matrix of one rank."""
    made = {}
    for name, bad in (("inf", torch.inf), ("nan", torch.nan)):
        ddp, scaling = wrapped(0.25)
        gradients = gradients_of(RANK)
        if RANK == 2:
            gradients[0][3, 4] = bad
        ours = averages(ddp, gradients)
        shares = [float(g.isnan().float().mean()) for g in ours]
        made[name] = [shares, equal_on_ranks(ours), scaling.mu.item() > 0]
    return made


def case_bytes():
    ddp, _ = wrapped()
    for seed in range(2):  # after the first backward DDP broadcasts the order of its buckets
        averages(ddp, gradients_of(RANK, seed))
    with count_communication() as count:
        averages(ddp, gradients_of(RANK))
    return [[row.kind, str(row.dtype), row.calls, row.bytes_sent] for row in count.rows]


def case_float64():
    """Averaged as without the hook."""
    ddp, _ = wrapped(dtype=torch.float64)
    ours = averages(ddp, gradients_of(RANK, dtype=torch.float64))
    of_ranks = [gradients_of(rank, dtype=torch.float64) for rank in range(WORLD)]
    theirs = [sum(grads) / WORLD for grads in zip(*of_ranks, strict=True)]
    return distance(ours, theirs)


def trained(steps, state=None, seed=RANK):
    """A converted model under DDP after some steps, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 96))
    config = FP8Config(communication="fp8-lm")
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    convert_optimizer(optimizer, config, model=model)
    ddp = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
    report = connect_ddp(ddp, [optimizer], config)
    if state is not None:
        weights, states, scaling = state
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        load_scaling_state_dict(model, scaling)
    losses = [step(ddp, optimizer, i) for i in steps]
    return ddp, optimizer, report, losses


def step(ddp, optimizer, i):
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(10 * i + RANK))
    with torch.autocast("cpu", torch.bfloat16):
        loss = (ddp(x).float() - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def case_connected():
    ddp, _, report, losses = trained(range(8))
    name, exchange = ddp._get_ddp_logging_data()["comm_hook"], ddp._comm_hooks[0][1]
    equal = equal_on_ranks([p.detach().float() for p in ddp.parameters()])
    rule = type(exchange).__name__
    return [str(report), name, rule, equal, losses[-1] < losses[0]]


def case_resumed():
    """Weights after 8 steps, and after 4 that were saved, loaded and went on: equal bit for bit."""
    whole, _, _, _ = trained(range(8))
    half, optimizer, _, _ = trained(range(4))
    saved = (half.module.state_dict(), optimizer.state_dict(), scaling_state_dict(half.module))
    saved = copy.deepcopy(saved)
    rest, _, _, _ = trained(range(4, 8), saved, seed=9)
    mus = [automatic_scaling(ddp.module).mu.item() for ddp in (whole, half, rest)]
    same = all(map(torch.equal, whole.module.state_dict().values(), rest.state_dict().values()))
    return same, mus


def case_copied():
    """A copy has a mu of its own, and averages by the same rule."""
    ddp, _, _, _ = trained(range(2))
    copied = copy.deepcopy(ddp)
    before = automatic_scaling(ddp.module).mu.item()
    copied(torch.randn(4, 96)).square().mean().backward()
    equal = equal_on_ranks([p.grad.float() for p in copied.parameters()])
    after = automatic_scaling(copied.module).mu.item()
    return before == automatic_scaling(ddp.module).mu.item(), before != after, equal


def case_quality():
    """SQNR in dB of the mean of independent Gaussian gradients: of the whole, of the worst row."""
    made = {}
    for name in ("ours", "fp8-lm"):
        ddp, _ = wrapped()
        if name == "ours":
            ddp = DistributedDataParallel(Weights())
            ddp.register_comm_hook(QuantizedAllReduce(dist.group.WORLD), average_bucket)
        values = []
        for seed in range(4):  # mu has found its place
            of_ranks = [gaussian(rank, seed) for rank in range(WORLD)]
            values = averages(ddp, of_ranks[RANK])
        exact = [sum(g[i].double() for g in of_ranks) / WORLD for i in range(2)]
        whole = [sqnr_db(a, b) for a, b in zip(exact, values, strict=False)]
        rows = [worst_row_sqnr_db(a, b) for a, b in zip(exact, values, strict=False)]
        made[name] = [float(min(whole)), float(min(rows))]
    return made


def gaussian(rank, seed):
    generator = torch.Generator().manual_seed(1000 + 10 * seed + rank)
    return [torch.randn(weight.shape, generator=generator) for weight in Weights().weights]


def case_uneven():
    """Rank r has r + 1 batches."""
    ddp, optimizer, _, _ = trained(())
    with ddp.join():
        for i in range(RANK + 1):
            step(ddp, optimizer, i)
    # The weights of the rank that had most are everybody's.
    return equal_on_ranks([p.detach().float() for p in ddp.parameters()])


def main():
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=WORLD
    )
    results = {}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            try:
                results[name.removeprefix("case_")] = {"value": case()}
            except BaseException:
                results[name.removeprefix("case_")] = {"error": traceback.format_exc()}
    with open(sys.argv[4], "w") as file:
        json.dump(results, file)
    dist.barrier()
    os._exit(0)  # gloo may hang at exit


main()
