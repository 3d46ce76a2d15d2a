"""Cases of Muon with an int8 momentum, and of attention that saves FP8, on two ranks."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_ranks import RANK, RANKS
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.batched_muon import SingleDeviceMuon
from tests.comm_counter import count_communication
from tests.internals import Int8Momentum, adopt_steps, local
from tests.moe_experts import batch, experts
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import connect_ddp, connect_fsdp, split_sharded

WIDTH, HIDDEN = 128, 199
CONFIG = FP8Config(communication="off")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False))


def made(fp8, sharded=True):
    model = net()
    if fp8:
        convert_to_float8(model, CONFIG)
    if sharded:
        for module in (*model, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.01)
    if fp8 and sharded:
        split_sharded(model, [optimizer], CONFIG)
        connect_fsdp(model, CONFIG)
    elif fp8:
        convert_optimizer(optimizer, CONFIG, model=model)
    return model, optimizer


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step % 4))
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x).float() - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def case_muon_shards():
    results = {}
    for name, fp8 in (("stock", False), ("int8", True)):
        model, optimizer = made(fp8)
        losses = train(model, optimizer, range(6))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        with count_communication() as sent:
            optimizer.step()
        results[name] = losses, sent.bytes_sent, sent.calls
    results["one rank"] = train(*made(True, sharded=False), range(6))
    states = [local(s["momentum_buffer"]) for s in optimizer.state.values()]
    return results, [isinstance(s, Int8Momentum) for s in states], RANK


def case_muon_resumes():
    with tempfile.TemporaryDirectory() as folder:
        paths = [folder]
        dist.broadcast_object_list(paths)
        model, optimizer = made(True)
        train(model, optimizer, range(3))
        state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=paths[0])
        want = train(model, optimizer, range(3, 6))
        again, resumed = made(True)
        target = {
            "model": get_model_state_dict(again),
            "optimizer": get_optimizer_state_dict(again, resumed),
        }
        dcp.load(target, checkpoint_id=paths[0])
        again.load_state_dict(target["model"])
        set_optimizer_state_dict(again, resumed, target["optimizer"])
        adopt_steps(paths[0], [resumed])
        got = train(again, resumed, range(3, 6))
        dist.barrier()
    shards = zip(model.parameters(), again.parameters(), strict=True)
    equal = [torch.equal(a.full_tensor(), b.full_tensor()) for a, b in shards]
    return want == got, all(equal)


def case_muon_ddp():
    model, optimizer = made(True, sharded=False)
    ddp = DistributedDataParallel(model)
    connect_ddp(ddp, [optimizer], CONFIG)
    losses = train(ddp, optimizer, range(4))
    alone = train(*made(True, sharded=False), range(4))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(RANKS)]
    dist.all_gather(others, weights.contiguous())
    return losses, alone, torch.equal(*others)


def case_muon_experts():
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        module = experts()
        convert_to_float8(module, CONFIG)
        if sharded:
            fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))
        optimizer = SingleDeviceMuon(module.parameters(), lr=0.02)
        if sharded:
            split_sharded(module, [optimizer], CONFIG)
            connect_fsdp(module, CONFIG)
        else:
            convert_optimizer(optimizer, CONFIG, model=module)
        torch.manual_seed(1)
        x, index, scores = batch(64)
        losses = []
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = (module(x, index, scores).float() - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        momenta = [local(s["momentum_buffer"]) for s in optimizer.state.values()]
        assert all(isinstance(m, Int8Momentum) for m in momenta)
        results.append((losses, [len(m) for m in momenta]))
    return results
