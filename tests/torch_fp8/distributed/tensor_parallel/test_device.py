"""Sequence parallelism on a group of one rank: what is gathered is what one rank casts.

On the CPU through gloo; on a card, native GEMMs and Triton casts, through NCCL.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.internals import RECIPES, sqnr_db
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel
from torch_fp8.ops.hardware import check_device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, tmp_path):
    backend = {"cpu": "gloo", "cuda": "nccl"}[request.param]
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("again", [False, True], ids=["kept", "gathered again"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_group_of_one_is_one_rank(device, recipe, again):
    try:
        check_device(torch.device(device), recipe, emulate=False)
    except ValueError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    # A row-wise layer adds its bias to the sum of all ranks, in 16 bits; alone its GEMM does.
    down = nn.Linear(272, 160, bias=False)
    one = nn.Sequential(nn.Linear(160, 272), nn.GELU(), down).bfloat16().to(device)
    model = copy.deepcopy(one)
    plan = {
        "0": Float8ColwiseParallel(input_layouts=Shard(1), gather_in_backward=again),
        "2": Float8RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, init_device_mesh(device, (1,)), plan)
    x, g = (torch.randn(2, 72, 160, device=device).bfloat16() for _ in range(2))
    inputs, outputs = [], []
    for network in (one, model):
        convert_to_float8(network, FP8Config(recipe=recipe))
        inputs.append(x.clone().requires_grad_())
        outputs.append(network(inputs[-1]))
        outputs[-1].backward(g)
    assert torch.equal(*outputs)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for p, q in zip(one.parameters(), model.parameters(), strict=True):
        mine = q.grad.full_tensor()
        # Scales of rows and blocks: cast once more along tokens, from what was rounded already.
        exact = recipe in ("tensorwise", "delayed") or p.ndim == 1
        assert torch.equal(p.grad, mine) if exact else sqnr_db(p.grad.float(), mine.float()) > 28
