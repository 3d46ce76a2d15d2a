"""Gathers in FP8 when shards are replaced, and whoever starts them; run by run_cases.py."""

import copy
import functools

import torch
import torch.distributed as dist
from fsdp_ranks import (
    BF16,
    RANKS,
    Block,
    attached,
    averaged,
    batch,
    loss_of,
    model_of,
    reshard,
    sharded,
    train,
    unshard,
    weights_of,
)
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.comm_counter import count_communication
from tests.internals import CastOptions, SplitShard, local, sqnr_db
from tests.steps import renew_scales
from tests.torch_fp8.nn.test_conv1d import Conv1D
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, set_forward_precision
from torch_fp8.distributed import connect_fsdp, split_sharded
from torch_fp8.ops.quantize import quantize_layouts


def case_own_states():
    config = FP8Config()
    model, _ = sharded(config, BF16, model_of(hidden=99), connected=False)
    alone = model_of(hidden=99)
    convert_to_float8(alone, config)
    optimizers = [torch.optim.RMSprop(m.parameters(), lr=1e-3) for m in (model, alone)]
    (report,) = split_sharded(model, optimizers[:1], config)
    convert_optimizer(optimizers[1], config, model=alone)
    connect_fsdp(model, config)
    for step in range(3):
        for i, (name, p) in enumerate(alone.named_parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + i))
            shard = model.get_parameter(name)
            shard.grad = distribute_tensor(p.grad, shard.device_mesh, shard.placements)
        for optimizer in optimizers:
            optimizer.step()
    split = [n for n, p in model.named_parameters() if isinstance(local(p), SplitShard)]
    names = [name for name, _ in alone.named_parameters()]
    wholes = [model.get_parameter(name).full_tensor() for name in names]
    equal = [torch.equal(w, p.detach()) for w, p in zip(wholes, alone.parameters(), strict=True)]
    return report.num_split, len(split), all(equal)


def case_lost():
    config = FP8Config(opt_level="O1")
    alone = model_of()
    convert_to_float8(alone, config)
    result = {}
    for when in ("before the first forward", "after it"):
        model, _ = sharded(config)
        if when == "after it":
            loss_of(model, batch(0)).backward()
            model.zero_grad()
        before = attached(model)
        model._apply(torch.clone)  # as another device does
        after = attached(model)
        if when != "after it":
            model.to(torch.bfloat16)
        losses = [float(loss_of(one, batch(0))) for one in (model, alone)]
        loss_of(model, batch(0)).backward()
        dtypes = {str(w.dtype) for w in weights_of(unshard(model)).values()}
        reshard(model)
        result[when] = [before, after, attached(model), sorted(dtypes), *losses]

    model, _ = sharded(config)
    loss_of(model, batch(0))
    reshard(model)
    state = {name: value.detach() * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    after = attached(model)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.mul_(2)
    losses = [float(loss_of(one, batch(0))) for one in (model, alone)]
    reshard(model)
    result["assign"] = [after, attached(model), *losses]

    unshard(model)
    kinds = [type(weight).__name__ for weight in weights_of(model).values()]
    converted = len(convert_to_float8(model, config).converted)
    result["converted again"] = [kinds, converted]
    reshard(model)
    again = connect_fsdp(model, config)
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    connect_fsdp(model, config)
    result["again"] = [
        again.num_gathers,
        hooks == [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()],
    ]

    model, _ = sharded(FP8Config(opt_level="O1", eval_fp8=False))
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(0)).backward()
    with torch.no_grad():
        evaluated = model.eval()(batch(1))
    kinds = len(weights_of(unshard(model)))
    reshard(model)
    model.train().set_requires_gradient_sync(True)
    loss_of(model, batch(1)).backward()
    other, _ = sharded(FP8Config(opt_level="O1"))
    other.set_requires_gradient_sync(False)
    loss_of(other, batch(0)).backward()
    other.set_requires_gradient_sync(True)
    loss_of(other, batch(1)).backward()
    exact = model_of()(batch(1))
    result["evaluation"] = [
        torch.equal(evaluated, exact),
        kinds,
        all(
            torch.equal(p.grad.to_local(), q.grad.to_local())
            for p, q in zip(model.parameters(), other.parameters(), strict=True)
        ),
    ]
    model, _ = sharded(config)
    alone = model_of()
    convert_to_float8(alone, config)
    loss_of(model, batch(0)).backward()
    for one in (model, alone):
        one.zero_grad()
        set_forward_precision(one, "bf16")
    with torch.no_grad():
        in_bf16 = model(batch(1))
    kinds = len(weights_of(unshard(model)))
    reshard(model)
    loss = float(loss_of(model, batch(1)))
    result["forward in BF16"] = [
        torch.equal(in_bf16, exact),
        kinds,
        loss == float(loss_of(alone, batch(1))),
    ]
    return result


def case_without_root():
    result = {}
    config = FP8Config(opt_level="O1")
    model, _ = sharded(config)
    alone = model_of()
    convert_to_float8(alone, config)
    loss_of(model, batch(0)).backward()

    def grown(factor):
        with torch.no_grad():
            for one in (model, alone):
                for parameter in one.parameters():
                    parameter.data.mul_(factor)

    def right():
        named = weights_of(model).items()
        return [
            torch.equal(
                w.scale,
                quantize_layouts(
                    alone.get_submodule(n).weight.detach(),
                    CastOptions.of(w.payload.spec, rowwise=True, columnwise=False),
                )[0].scale,
            )
            for n, w in named
        ]

    grown(2)
    with count_communication() as count:
        model.unshard()
        model[1].unshard()
    result["unshard"] = [right(), count.of("all-reduce").calls]
    loss_of(model, batch(0)).backward()
    grown(2)
    with count_communication() as count, torch.no_grad():
        model[1](torch.randn(2, 64))
    model[1].unshard()
    result["child"] = [count.of("all-reduce").calls, right()]
    reshard(model)

    class Method(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def generate(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    one = Method()
    other = Method()
    other.load_state_dict(one.state_dict())
    for made in (one, other):
        convert_to_float8(made, config)
    for layer in one.layers[:2]:
        fully_shard(layer)
    fully_shard(one)
    connect_fsdp(one, config)
    register_fsdp_forward_method(one, "generate")
    losses = []
    for factor in (1, 3):
        for made in (one, other):
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.mul_(factor)
            x = torch.ones(4, 64)
            loss = made.generate(x).float().square().mean()
            loss.backward()
            losses.append(float(loss))
    result["method"] = losses
    return result


def case_recomputed():
    made = []
    for kind in ("plain", "reentrant", "not reentrant", "prefetched"):
        config = FP8Config(recipe="delayed", opt_level="O1")
        model, _ = sharded(config)
        if "reentrant" in kind:
            for block in model:
                if isinstance(block, Block):
                    block.forward = functools.partial(
                        checkpoint, block.forward, use_reentrant=kind == "reentrant"
                    )
        if kind == "prefetched":
            model.set_modules_to_forward_prefetch([model[1], model[2]])
            model[2].set_modules_to_backward_prefetch([model[1]])
        for step in range(2):
            model.zero_grad()
            with count_communication() as count:
                loss = loss_of(model, batch(step))
                loss.backward()
            renew_scales()
        grads = torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
        history = model[1].up.fp8_amax_history.clone()
        made.append((float(loss), grads, history, count.of("all-reduce").calls))
    return [
        [m[0] == made[0][0], torch.equal(m[1], made[0][1]), torch.equal(m[2], made[0][2]), m[3]]
        for m in made
    ]


def case_conv1d():
    """GPT-2's transposed weights, of which one has uneven shards, against all on one rank.

    Returns:
        For each recipe: SQNR of the output and of the gradients averaged over the ranks, in dB,
        and the largest difference of the losses of three steps.
    """
    result = {}
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"):
        config = FP8Config(recipe=recipe, opt_level="O1", emulate=True)
        torch.manual_seed(0)
        model = nn.Sequential(Conv1D(96, 32), nn.GELU(), Conv1D(64, 96), Conv1D(48, 64))
        for layer in (model[0], model[2], model[3]):
            nn.init.normal_(layer.weight, std=0.2)
        alone = copy.deepcopy(model)
        for layer in (model[0], model[2], model[3], model):
            fully_shard(layer)
        convert_to_float8(model, config)
        convert_to_float8(alone, config)
        connect_fsdp(model, config)
        outputs, decibels = [], []
        for one in (model, alone):
            outputs.append(one(batch(0)))
            outputs[-1].square().mean().backward()
        for shard, whole in zip(model.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(whole.grad)
            if whole.ndim == 2:
                decibels.append(float(sqnr_db(whole.grad / RANKS, shard.grad.full_tensor())))
        output = min(float(sqnr_db(outputs[1].detach(), outputs[0].detach())), 200.0)
        result[recipe] = [output, min(decibels), *_losses(model, alone)]
    return result


def _losses(model, alone):
    """Of the last of three steps: sharded, and alone on the batches of all ranks."""
    for one, ranks in ((model, None), (alone, range(RANKS))):
        one.zero_grad()
        optimizer = torch.optim.AdamW(one.parameters(), lr=3e-3)
        loss = train(one, optimizer, range(1, 4), *([] if ranks is None else [ranks]))
        yield averaged(loss.detach())
