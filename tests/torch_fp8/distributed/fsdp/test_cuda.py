"""FSDP2's gathers on one card, with and without CPU offload; several cards await a machine."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from tests.internals import (
    UnshardedFloat8Weight,
    layout_of,
    pack_parts,
    structure_of,
    tensor_amax,
    unpack_parts,
)
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed import connect_fsdp
from torch_fp8.ops.quantize import quantize

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture
def process_group(tmp_path):
    """One process, with the backends that torch takes by default where there is a card."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("offload", [False, True], ids=["on the card", "CPU offload"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_one_rank_trains_as_without_fsdp(process_group, recipe, offload):
    model = nn.Sequential(nn.Linear(256, 384), nn.Linear(384, 128))
    config = FP8Config(recipe=recipe, emulate=True, opt_level="O1")
    alone = copy.deepcopy(model).to(CUDA)
    if not offload:
        model.to(CUDA)
    for one in (model, alone):
        convert_to_float8(one, config, device=CUDA)
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)), offload_policy=policy)
    assert connect_fsdp(model, config).num_gathers == 2
    x = torch.randn(32, 256, device=CUDA)
    for _ in range(3):
        losses = []
        for one in (model, alone):
            one.zero_grad()
            loss = one(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    model.unshard()
    weight = model[0].weight
    assert isinstance(weight, UnshardedFloat8Weight)
    assert weight.device.type == "cuda"
    if recipe != "delayed":
        whole = quantize(alone[0].weight.detach(), weight.payload.spec)
        assert torch.equal(whole.qdata.view(torch.uint8), weight.qdata.view(torch.uint8))
        assert torch.equal(whole.scale, weight.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_amaxes_of_a_list_are_those_of_its_tensors(dtype):
    shards = [torch.randn(n, 96, device=CUDA).to(dtype) for n in (1, 33, 1000)]
    shards += [torch.full((3, 3), torch.nan, device=CUDA, dtype=dtype)]
    made = torch._foreach_norm(shards, torch.inf, dtype=torch.float32)
    for amax, shard in zip(made, shards, strict=True):
        torch.testing.assert_close(amax, tensor_amax(shard), rtol=0, atol=0, equal_nan=True)


def test_messages_are_those_of_the_cpu():
    structure = structure_of([(33 * 96, True), (100, False), (64 * 96, True)])
    parts = torch.randn(4, 33 * 96 + 100 + 64 * 96, dtype=torch.bfloat16)
    messages = pack_parts(parts, structure)
    on_card = pack_parts(parts.to(CUDA), structure)
    layout = layout_of(structure)
    for part in (layout.codes, layout.scales, layout.plain):
        assert torch.equal(part(messages), part(on_card.cpu()))
    outputs = [torch.empty(parts.shape[1], dtype=torch.bfloat16, device=d) for d in ("cpu", CUDA)]
    for output, sent in zip(outputs, (messages, on_card), strict=True):
        unpack_parts(sent, structure, output, 0.25)
    assert torch.equal(outputs[0], outputs[1].cpu())
