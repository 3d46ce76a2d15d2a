"""Folders of shards that were written while residuals were in the optimizer's state."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_fp8
from tests.probe.older_folders import as_written_before
from torch_fp8 import FP8Config
from torch_fp8.checkpoint.adopt_residuals import adopt_residuals
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8.distributed.fsdp.split_weights import split_sharded
from torch_fp8.tensor.dtensor import local
from torch_fp8.tensor.encoded import plain

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(config, sharded=True, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 97), nn.LayerNorm(97), nn.Linear(97, 64))
    torch_fp8.convert_to_float8(net, config)
    if sharded:
        fully_shard(net, mp_policy=POLICY)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if sharded:
        split_sharded(net, [optimizer], config)
        connect_fsdp(net, config)
    else:
        torch_fp8.convert_optimizer(optimizer, config, model=net)
    return net, optimizer


def step(net, optimizer, seed):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    with torch.autocast("cpu", torch.bfloat16):
        (net(x) - x).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def load(net, optimizer, folder):
    state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def values(net):
    return [plain(local(p.detach())).clone() for p in net.parameters()]


@pytest.fixture(params=[8, 4], ids=["8_bits", "4_bits"])
def older(request, tmp_path):
    """A folder, its configuration, and the weights in it."""
    config = FP8Config(residual_bits=request.param)
    net, optimizer = make(config)
    for seed in range(2):
        step(net, optimizer, seed)
    state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    for name in ("now", "older"):
        dcp.save(state, checkpoint_id=tmp_path / name)
    as_written_before(tmp_path / "older", request.param)
    return tmp_path / "older", config, net, optimizer


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])
def test_weights_of_an_older_folder_go_on_to_the_bit(older, sharded):
    folder, config, net, optimizer = older
    again, of_again = make(config, sharded, seed=1)
    load(again, of_again, folder)
    assert not all(map(torch.equal, values(again), values(net)))
    assert adopt_residuals(folder, again) == len(list(net.parameters()))
    assert all(map(torch.equal, values(again), values(net)))
    step(net, optimizer, 2)
    step(again, of_again, 2)
    if sharded:  # gathered in FP8, the gradients differ a little
        assert all(map(torch.equal, values(again), values(net)))


def test_weights_that_have_lower_bits_stay_and_are_named(older):
    folder, _, net, optimizer = older
    step(net, optimizer, 2)
    before = values(net)
    with pytest.warns(
        UserWarning, match="has residuals for 6 weights that do not match .* '0.bias'"
    ):
        assert adopt_residuals(folder, net) == 0
    assert all(map(torch.equal, values(net), before))
    other = nn.Sequential(nn.Linear(64, 98))
    with pytest.warns(UserWarning, match="has residuals for 2 weights"):
        assert adopt_residuals(folder, other) == 0


def test_other_folders_change_nothing(older, recwarn):
    folder, config, net, _ = older
    again, of_again = make(config, seed=1)
    load(again, of_again, folder.with_name("now"))
    assert all(map(torch.equal, values(again), values(net)))
    for path in (folder.with_name("now"), folder / "missing", folder / ".metadata"):
        assert adopt_residuals(path, again) == 0
    assert not recwarn.list
