"""What takes four ranks: two mesh dimensions, shards without rows; run by run_cases.py."""

import itertools

import torch
from fsdp_ranks import (
    BF16,
    RANK,
    RANKS,
    averaged,
    batch,
    loss_of,
    model_of,
    sharded,
    train,
    trained,
    unshard,
    weights_of,
)
from fsdp_scatter_cases import case_bytes  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.comm_counter import count_communication
from tests.internals import make_recipe, to_float8
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed import connect_fsdp
from torch_fp8.ops.quantize import quantize


def case_few_rows():
    """Weights of 1, 3, 5 and 33 rows: shards of one row, of none, of less than the others'."""
    result = {}
    for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8"):
        torch.manual_seed(0)
        sizes = (64, 33, 5, 3, 1)
        pairs = list(itertools.pairwise(sizes))
        model, alone = (nn.Sequential(*(nn.Linear(k, n) for k, n in pairs)) for _ in range(2))
        alone.load_state_dict(model.state_dict())
        config = FP8Config(recipe=recipe, opt_level="O1", emulate=True)
        for one in (model, alone):
            for i, layer in enumerate(one):  # also those that convert_to_float8 finds too small
                to_float8(layer, str(i), config, make_recipe(recipe), True)
        fully_shard(model)
        report = connect_fsdp(model, config)
        unshard(model)
        same = []
        for name, weight in weights_of(model).items():
            layer = alone.get_submodule(name)
            whole = quantize(layer.weight.detach(), layer.fp8.recipe.weight)
            bits = torch.equal(whole.qdata.view(torch.uint8), weight.qdata.view(torch.uint8))
            same.append(bits and torch.equal(whole.scale, weight.rowwise().scale))
        model.reshard()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(RANK))
        model(x).sum().backward()
        everybody = [
            torch.randn(8, 64, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)
        ]
        (alone(torch.cat(everybody)).sum() / RANKS).backward()
        errors = []
        for ours, exact in zip(model.parameters(), alone.parameters(), strict=True):
            whole = ours.grad.full_tensor()
            errors.append(float((whole - exact.grad).norm() / exact.grad.norm().clamp(min=1e-9)))
        result[recipe] = [report.num_gathers, same, errors]
    return result


def case_two_dimensions():
    config = FP8Config(opt_level="O2")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = trained(config, BF16, model_of(hidden=99), mesh=mesh)
    alone = model_of(hidden=99)
    convert_to_float8(alone, config)
    single = torch.optim.AdamW(alone.parameters(), lr=3e-3)
    losses = []
    for one, stepped, ranks in ((model, optimizer, (RANK,)), (alone, single, range(RANKS))):
        losses.append([averaged(train(one, stepped, [step], ranks)) for step in range(8)])
    with count_communication() as count:
        loss_of(model, batch(0)).backward()
    rows = [[r.kind, str(r.dtype), r.ranks, r.calls] for r in count.rows]
    return [*losses, rows]


def case_number():
    """``reshard_after_forward=2``: torch gathers as it is; gradients are scattered in FP8."""
    config = FP8Config(opt_level="O1")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, report = sharded(config, policy, reshard_after_forward=2)
    with count_communication() as count:
        loss_of(model, batch(0)).backward()
    rows = [[r.kind, str(r.dtype), r.ranks] for r in count.rows]
    return [report.num_gathers, report.num_scatters, str(report), rows]
