import functools
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.batched_muon import SingleDeviceMuon
from tests.comm_counter import count_communication
from tests.internals import Int8Momentum, adopt_steps, local
from tests.moe_experts import batch, experts
from tests.steps import train_steps
from tests.torch_fp8.distributed.ranks import RANKS, on_ranks
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import connect_fsdp, split_sharded

pytestmark = pytest.mark.long


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


def _loss(model, step):
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step % 4))
    with torch.autocast("cpu", torch.bfloat16):
        return (model(x).float() - x.roll(1, 1)).square().mean()


train = functools.partial(train_steps, loss_of=_loss)


@on_ranks(2)
def test_shards_train_as_one_rank_does_and_gather_a_weight_once_in_int8():
    results = {}
    for name, fp8 in (("stock", False), ("int8", True)):
        model, optimizer = made(fp8)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        with count_communication() as sent:
            optimizer.step()
        losses = train(model, optimizer, 6)
        results[name] = losses, sent.bytes_sent, sent.calls
    (stock, stock_bytes, _), (int8, int8_bytes, calls) = results.values()
    assert int8 == pytest.approx(stock, rel=2e-3)
    of_one = train(*made(True, sharded=False), 6)
    assert int8 == pytest.approx(of_one, rel=2e-3)
    # A byte an element and a scale for 64, half of it of the other rank.
    assert calls == 2
    assert int8_bytes <= 0.55 * 2 * WIDTH * HIDDEN
    assert int8_bytes < 0.1 * stock_bytes
    states = [local(s["momentum_buffer"]) for s in optimizer.state.values()]
    assert all(isinstance(s, Int8Momentum) for s in states)


@on_ranks(2)
def test_a_folder_of_shards_goes_on_bit_for_bit():
    with tempfile.TemporaryDirectory() as folder:
        paths = [folder]
        dist.broadcast_object_list(paths)
        model, optimizer = made(True)
        train(model, optimizer, 3)
        state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=paths[0])
        want = train(model, optimizer, 3, 3)
        again, resumed = made(True)
        target = {
            "model": get_model_state_dict(again),
            "optimizer": get_optimizer_state_dict(again, resumed),
        }
        dcp.load(target, checkpoint_id=paths[0])
        again.load_state_dict(target["model"])
        set_optimizer_state_dict(again, resumed, target["optimizer"])
        adopt_steps(paths[0], [resumed])
        got = train(again, resumed, 3, 3)
        dist.barrier()
    assert want == got
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())


@on_ranks(2)
def test_experts_are_stepped_where_they_lie():
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
        assert [len(m) for m in momenta] == ([2, 2] if sharded else [4, 4])
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-3)
