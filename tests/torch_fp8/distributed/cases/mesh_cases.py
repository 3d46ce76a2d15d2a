"""Cases on four ranks: FSDP2 and tensor parallelism on a mesh of 2 x 2, and odd sizes."""

import copy

import torch
import torch.distributed as dist
from parallel_ranks import WIDTH, Block, block_plan, db, full, part, rand
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.comm_counter import count_communication
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import connect_fsdp


def mesh_2d():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))


def sharded(config, connected, hidden=128):
    """Two blocks, tensor parallel, each sharded by FSDP2; and the same on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(True, hidden), Block(True, hidden)).bfloat16()
    exact, one = copy.deepcopy(model), copy.deepcopy(model)
    mesh = mesh_2d()
    for block in model:
        parallelize_module(block, mesh["tensor_parallel"], block_plan())
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    convert_to_float8(model, config)
    convert_to_float8(one, config)
    report = connect_fsdp(model, config) if connected else None
    return model, one, exact, mesh, report


def case_fsdp2():
    """Gradients against bfloat16's, beside those of one rank; bytes; the state on one rank."""
    results = {}
    for recipe, level, connected in (
        ("tensorwise", "O2", False),
        ("tensorwise", "O2", True),
        ("rowwise", "O3", True),
    ):
        config = FP8Config(recipe=recipe, opt_level=level)
        model, one, exact, mesh, report = sharded(config, connected)
        x, g = rand(4, 32, WIDTH), rand(4, 32, WIDTH, seed=1)
        with count_communication() as count:
            model(cut(x, mesh)).backward(cut(g, mesh) * 2)  # FSDP2 averages over its ranks
        for module in (one, exact):
            module(x).backward(g)
        gradients = [
            [db(e.grad, p.grad), db(e.grad, q.grad)]
            for (name, p), q, e in zip(
                model.named_parameters(), one.parameters(), exact.parameters(), strict=True
            )
            if name.endswith("weight") and "norm" not in name
        ]
        losses = trained(model, one, config, mesh) if recipe == "tensorwise" else None
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            one.load_state_dict(state)
        equal = [
            torch.equal(full(p), q)
            for p, q in zip(model.parameters(), one.parameters(), strict=True)
        ]
        results[f"{recipe} {connected}"] = {
            "gradients": gradients,
            "losses": losses,
            "gathers": None if report is None else report.num_gathers,
            "skipped": None if report is None else list(report.skipped),
            "bytes": count.bytes_sent,
            "loaded": all(equal) or dist.get_rank() > 0,
        }
    return results


def cut(x, mesh):
    """A rank's part: of the batch along data, of the tokens along tensor parallelism."""
    row, col = mesh.get_coordinate()
    return part(part(x, 0, row, 2), 1, col, 2)


def trained(model, one, config, mesh):
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    convert_optimizer(optimizer, config, model=model)
    single = torch.optim.AdamW(one.parameters(), lr=4e-3)
    convert_optimizer(single, config, model=one)
    losses = []
    for step in range(4):
        x = rand(4, 32, WIDTH, seed=step % 2)
        target = x + (x @ rand(WIDTH, WIDTH, seed=9) / 8).relu()
        optimizer.zero_grad()
        loss = mse(model(cut(x, mesh)), cut(target, mesh))
        (loss / 2).backward()  # a mean over the rank's own tokens, of which there are two halves
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 4)
        if dist.get_rank() == 0:
            single.zero_grad()
            loss = mse(one(x), target)
            loss.backward()
            single.step()
    return [losses[0], losses[-1], loss.item()]


def mse(y, target):
    return nn.functional.mse_loss(y.float(), target.float())
