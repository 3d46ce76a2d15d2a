"""Cases of training under tensor, sequence and pipeline parallelism on two ranks."""

import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel_ranks import (
    RANK,
    RANKS,
    WIDTH,
    Block,
    Pair,
    block_plan,
    full,
    mesh_of,
    message,
    pair_plan,
    parallel,
    part,
    rand,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.internals import Float8Grad, SplitShard, local, stored, stored_grad
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, restore_weights
from torch_fp8.distributed import join_sharded, split_sharded

STEPS = 12


def adamw(model, config, lr=1e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    convert_optimizer(optimizer, config, model=model)
    return optimizer


def batch(step):
    x = rand(2, 32, WIDTH, seed=step % 4)
    return x, x + (x @ rand(WIDTH, WIDTH, seed=9) / 8).relu()


def trained(model, optimizer, sequence, config):
    losses = []
    for step in range(STEPS):
        x, target = batch(step)
        if sequence:
            x, target = part(x), part(target)
        loss = nn.functional.mse_loss(model(x).float(), target.float())
        # The ranks' losses are means over their own tokens, and gradients are summed.
        (loss / RANKS if sequence else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if sequence:
            dist.all_reduce(total)
            total /= RANKS
        losses.append(total.item())
    return losses[-1], losses


def case_losses():
    """After some steps, at each level: parallel, on one rank, and in bfloat16."""
    results = {}
    torch.manual_seed(0)
    model = Block().bfloat16()
    exact = copy.deepcopy(model)
    bf16 = trained(exact, torch.optim.AdamW(exact.parameters(), lr=4e-3), False, None)
    for level in ("O1", "O2", "O3"):
        config = FP8Config(opt_level=level)
        mine, one = parallel(copy.deepcopy(model), block_plan(), config)
        optimizer = adamw(mine, config, 4e-3)
        last, losses = trained(mine, optimizer, True, config)
        theirs, _ = trained(one, adamw(one, config, 4e-3), False, config)
        results[level] = [last, theirs, losses[0]]
    # bfloat16 without a master copy is another run; O1 has the same weights.
    return {**results, "bf16": bf16[0]}


def case_states_are_those_of_one_rank():
    """Steps on given gradients, weights sharded on dimension 0 and on 1: equal bit for bit."""
    results = {}
    for split in (True, False):
        config = FP8Config(opt_level="O2", split_weights=split)
        torch.manual_seed(0)
        model, one = parallel(Pair(128, 256).bfloat16(), pair_plan(), config)
        optimizer, single = adamw(model, config, 1e-2), adamw(one, config, 1e-2)
        pairs = list(zip(model.parameters(), one.parameters(), strict=True))
        for step in range(3):
            for i, (p, q) in enumerate(pairs):
                q.grad = rand(*q.shape, seed=10 * step + i)
                p.grad = distribute_tensor(q.grad.clone(), mesh_of(), p.placements)
            optimizer.step()
            single.step()
        ours, theirs = full_state(model, optimizer), full_state(one, single)
        different = [n for n, (p, q) in enumerate(pairs) if not torch.equal(full(p), q)]
        for name, entry in theirs["state"].items():
            different += [
                f"{name} {key}"
                for key, value in entry.items()
                if not torch.equal(as_bytes(ours["state"][name][key]), as_bytes(value))
            ]
        results[str(split)] = different
    return results


def as_bytes(x):
    """A residual of 16 bits is saved as bytes where it is sharded."""
    return full(x).contiguous().view(-1).view(torch.uint8)


def full_state(model, optimizer):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    everywhere = [state]  # a full state is on rank 0
    dist.broadcast_object_list(everywhere)
    return everywhere[0]


def case_gradients():
    """Of what all ranks have, under sequence parallelism: partial sums, summed by the step; those
    of weights have 8 bits at O3, as on one rank."""
    config = FP8Config(opt_level="O3")
    torch.manual_seed(0)
    model, one = parallel(Block(bias=True).bfloat16(), block_plan(), config)
    optimizer, single = adamw(model, config), adamw(one, config)
    x, target = batch(0)
    nn.functional.mse_loss(model(part(x)).float(), part(target).float(), reduction="sum").backward()
    nn.functional.mse_loss(one(x).float(), target.float(), reduction="sum").backward()
    partial = sorted(
        n for n, p in model.named_parameters() if any(q.is_partial() for q in p.grad.placements)
    )
    eight_bit = sum(isinstance(local(p.grad), Float8Grad) for p in model.parameters())
    optimizer.step()
    single.step()
    grads = {
        name: (full(p.grad).float() - q.grad.float()).norm().item() / q.grad.float().norm().item()
        for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True)
        if name in partial
    }
    settled = all(p.grad.placements == p.placements for p in model.parameters())
    return [partial, eight_bit, settled, grads]


def case_checkpoints():
    results = {}
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    for level in ("O2", "O3"):
        path = os.path.join(folder[0], level)
        config = FP8Config(opt_level=level)
        torch.manual_seed(0)
        model, one = parallel(Pair(128, 256).bfloat16(), pair_plan(), config)
        optimizer = adamw(model, config)
        for step in range(2):
            model(part(rand(2, 16, 128, seed=step))).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
        weights = {n: full(p).clone() for n, p in model.named_parameters()}
        saved = full_state(model, optimizer)["state"]
        if RANK == 0:
            results[level] = opened(path, one, config, weights, saved)
        dist.barrier()
        # Back into another pair of ranks, which then goes on bit for bit.
        torch.manual_seed(1)
        again, _ = parallel(Pair(128, 256).bfloat16(), pair_plan(), config)
        optimizer2 = adamw(again, config)
        target = {
            "model": get_model_state_dict(again),
            "optimizer": get_optimizer_state_dict(again, optimizer2),
        }
        dcp.load(target, checkpoint_id=path)
        again.load_state_dict(target["model"])
        set_optimizer_state_dict(again, optimizer2, target["optimizer"])
        for network, o in ((model, optimizer), (again, optimizer2)):
            network(part(rand(2, 16, 128, seed=7))).float().square().mean().backward()
            o.step()
        same = all(
            torch.equal(p._local_tensor, q._local_tensor)
            for p, q in zip(model.parameters(), again.parameters(), strict=True)
        )
        results[f"{level} resumed"] = same
    return results


def opened(path, one, config, weights, saved):
    different = []
    for stock in (False, True):
        optimizer = torch.optim.AdamW(one.parameters(), lr=3e-3)
        if not stock:
            convert_optimizer(optimizer, config, model=one)
        for p in one.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        names = [n for n, _ in one.named_parameters()]
        target = {
            "model": {n: p.detach() for n, p in one.named_parameters()},
            "optimizer": {
                "state": {
                    name: {
                        key: torch.empty_like(value)
                        for key, value in saved[name].items()
                        if not (stock and key == "residual")
                    }
                    for name in names
                }
            },
        }
        dcp.load(target, checkpoint_id=path, no_dist=True)
        different += [n for n, p in one.named_parameters() if not torch.equal(p, weights[n])]
        state = optimizer.state_dict()
        state["state"] = {i: target["optimizer"]["state"][n] for i, n in enumerate(names)}
        optimizer.load_state_dict(state)
        for name, entry in zip(names, optimizer.state_dict()["state"].values(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                # Stock AdamW has moments of the weights' dtype.
                value = saved[name][key].to(entry[key].dtype)
                if not torch.equal(entry[key], value):
                    different.append(f"{name} {key} {stock}")
    return different


def case_refused_shardings():
    mesh, results = mesh_of(), {}
    config = FP8Config(opt_level="O2")
    model, _ = parallel(Pair(WIDTH, 130).bfloat16(), pair_plan(), config)
    results["8 bits"] = message(adamw, model, config)
    small = nn.Sequential(nn.Linear(WIDTH, WIDTH)).bfloat16()
    small.odd = nn.Parameter(distribute_tensor(torch.zeros(3, 5).bfloat16(), mesh, [Shard(1)]))
    convert_to_float8(small[0])
    results["odd columns"] = message(adamw, small, config)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model.experts = nn.Parameter(distribute_tensor(torch.zeros(4, 64, 64), mesh, [Shard(1)]))
    convert_to_float8(model[0])
    results["stacked"] = message(adamw, model, FP8Config(opt_level="O2"))
    return results


def case_split_float32():
    """Float32 weights sharded on dimensions 0 and 1 are split as on one rank, and train."""
    config = FP8Config(opt_level="O2")
    torch.manual_seed(0)
    model, one = parallel(Pair(128, 256), pair_plan(), config)
    before = [full(p).clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    split_sharded(model, [optimizer], config)
    single = adamw(one, config, 1e-2)
    split = [n for n, p in model.named_parameters() if isinstance(local(p), SplitShard)]
    with torch.autocast("cpu", torch.bfloat16):
        model(rand(2, 16, 128)).float().square().mean().backward()
    kinds = {type(local(p.grad)).__name__ for n, p in model.named_parameters() if n in split}
    for i, (p, q) in enumerate(zip(model.parameters(), one.parameters(), strict=True)):
        q.grad = rand(*q.shape, seed=i, dtype=stored(q).dtype)
        p.grad = distribute_tensor(stored_grad(q).to(p.dtype), mesh_of(), p.placements)
    optimizer.step()
    single.step()
    join_sharded(model, [optimizer])
    restore_weights(single)
    moved = [
        [torch.equal(full(p), q), not torch.equal(full(p), old)]
        for p, q, old in zip(model.parameters(), one.parameters(), before, strict=True)
        if p.ndim == 2
    ]
    return [split, sorted(kinds), moved]


def case_mixed_parameters():
    config = FP8Config(opt_level="O2")
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), Pair()).bfloat16()
    one = copy.deepcopy(model)
    model = parallelize_module(
        model, mesh_of(), {f"1.{name}": style for name, style in pair_plan(False).items()}
    )
    results = []
    for network in (model, one):
        convert_to_float8(network, config)
        optimizer = adamw(network, config)
        for step in range(3):
            network(rand(2, 16, WIDTH, seed=step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        # Not biases: they start near zero, where a step is as long as they are.
        weights = [p for n, p in network.named_parameters() if n.endswith("weight")]
        results.append([full(p).float() for p in weights])
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True))


def case_pipeline():
    results = {}
    for schedule, level, dtype in (
        (ScheduleGPipe, "O1", torch.bfloat16),
        (Schedule1F1B, "O2", torch.bfloat16),
        (ScheduleGPipe, "O2", torch.float32),
    ):
        config = FP8Config(opt_level=level)
        torch.manual_seed(0)
        stages = [Block().to(dtype), Block().to(dtype)]
        alone = copy.deepcopy(stages)
        for module in (*stages, *alone):
            convert_to_float8(module, config)
        optimizer = adamw(stages[RANK], config)
        stage = PipelineStage(stages[RANK], RANK, RANKS, torch.device("cpu"))
        run = schedule(stage, 4, loss_fn=mean_square)
        singles = [adamw(module, config) for module in alone]
        ours, theirs = [], []
        for step in range(3):
            x = rand(8, 16, WIDTH, seed=step, dtype=dtype)
            target = rand(8, 16, WIDTH, seed=step + 50, dtype=dtype)
            with torch.autocast("cpu", torch.bfloat16):
                losses = []
                if RANK == 0:
                    run.step(x)
                else:
                    run.step(target=target, losses=losses)
                    ours.append(torch.stack(losses).mean().item())
                parts = []
                for i in range(4):
                    y = alone[1](alone[0](x.chunk(4)[i]))
                    parts.append(mean_square(y, target.chunk(4)[i]))
                    parts[-1].backward()
                theirs.append(torch.stack(parts).mean().item())
            for o in (optimizer, *singles):
                for group in o.param_groups:
                    for p in group["params"]:
                        if o is not optimizer:
                            p.grad.div_(4)  # as schedules do
                o.step()
                o.zero_grad()
        same = all(
            torch.equal(p, q)
            for p, q in zip(stages[RANK].parameters(), alone[RANK].parameters(), strict=True)
        )
        name = f"{schedule.__name__} {level} {dtype}"
        results[name] = [same, ours == theirs if RANK else None, ours[-1:] + theirs[-1:]]
    return results


def mean_square(y, target):
    return nn.functional.mse_loss(y.float(), target.float())
