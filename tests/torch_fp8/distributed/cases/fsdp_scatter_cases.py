"""Gradients that FSDP2 scatters in FP8, and whole steps; run by run_cases.py."""

import warnings

import torch
from fsdp_ranks import (
    BF16,
    RANK,
    RANKS,
    Branches,
    averaged,
    batch,
    loss_of,
    model_of,
    sharded,
    train,
    trained,
)
from run_cases import worst_sum
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from tests.comm_counter import count_communication
from tests.internals import Float8Grad
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import connect_fsdp


def case_bytes():
    result = {}
    for communication in ("off", "fp8"):
        config = FP8Config(opt_level="O1", communication=communication)
        layers = [nn.Linear(256, 256, bias=False) for _ in range(4)]
        convert_to_float8(nn.ModuleList(layers), config)
        for layer in layers[:2]:
            fully_shard(layer, mp_policy=BF16, reshard_after_forward=True)
        model = nn.Sequential(*layers)
        fully_shard(model, mp_policy=BF16)
        connect_fsdp(model, config)
        for _ in range(2):
            with count_communication() as count, torch.autocast("cpu", torch.bfloat16):
                model(torch.randn(4, 256)).square().mean().backward()
        result[communication] = [[r.kind, str(r.dtype), r.calls, r.bytes_sent] for r in count.rows]
    return result


def case_scatter():
    """Errors of averaged gradients against float32's, of FP8 weights and of all others."""
    policies = {
        "fp32": MixedPrecisionPolicy(),
        "bf16": BF16,
        "bf16 reduced in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "bf16 reduced in fp16": MixedPrecisionPolicy(torch.bfloat16, torch.float16),
    }
    result = {}
    for name, policy in policies.items():
        for option in ("averaged", "divided", "accumulated", "summed"):
            exact = gradients(MixedPrecisionPolicy(policy.param_dtype, torch.float32), option, True)
            made = gradients(policy, option, False)
            errors = {True: 0.0, False: 0.0}
            for key, grad in exact.items():
                if option == "divided":
                    grad = grad * RANKS / 8
                eight = key.endswith(("0.weight", "up.weight", "down.weight"))
                if grad.numel():
                    error = float((made[key] - grad).norm() / grad.norm())
                    errors[eight] = max(errors[eight], error)
            result[f"{name} {option}"] = [errors[True], errors[False]]
    return result


def gradients(policy, option, stock):
    """Of this rank's shards, with weights gathered in FP8 and the stock scatter or ours."""
    model, _ = sharded(FP8Config(opt_level="O1"), policy, model_of(hidden=99))
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if stock:
            module.set_custom_reduce_scatter(DefaultReduceScatter())
        elif option == "divided":  # gloo itself cannot
            module.set_gradient_divide_factor(8.0)
        if option == "summed":
            module.set_force_sum_reduction_for_comms(True)
    micro_batches = 3 if option == "accumulated" else 1
    for i in range(micro_batches):
        model.set_requires_gradient_sync(i == micro_batches - 1)
        loss_of(model, batch(i)).backward()
    return {name: p.grad.to_local().float() for name, p in model.named_parameters()}


def case_unused():
    config = FP8Config(opt_level="O1")
    model = Branches()
    convert_to_float8(model, config)
    fully_shard(model)
    connect_fsdp(model, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            model(torch.full((4, 64), 1.0 + RANK)).sum().backward()
    grad = model.left.weight.grad.to_local()
    return {
        "right": model.right.weight.grad is None,
        "left": [float(grad.min()), float(grad.max())],
        "warnings": [str(w.message) for w in caught if "got no gradient" in str(w.message)],
    }


def case_o3():
    """Gradients in 8 bits inside DTensors, accumulated, clipped and stepped on."""
    result = {}
    for micro_batches in (1, 4):
        model, optimizer = trained(FP8Config(opt_level="O3"), BF16)
        plain, _ = trained(FP8Config(opt_level="O2", communication="off"), BF16)
        for i in range(micro_batches):
            for one in (model, plain):
                loss_of(one, batch(i)).backward()
        kinds = [type(p.grad._local_tensor) is Float8Grad for p in model.parameters()]
        norms = [
            float(nn.utils.clip_grad_norm_(one.parameters(), 1e-3).full_tensor())
            for one in (model, plain)
        ]
        clipped = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor())
        optimizer.step()
        result[str(micro_batches)] = [sum(kinds), norms, clipped]
    return result


def case_many_micro_batches():
    fp32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    policies = {"one": fp32, "sharded": BF16, "whole, float32": fp32, "whole, BF16": BF16}
    exact, result = [], {}
    cases = [("one", 1), ("sharded", 64), ("whole, float32", 64), ("whole, float32", 512)]
    for name, count in (*cases, *(("whole, BF16", n) for n in (64, 512, 2048))):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(32, 144), nn.LayerNorm(144))
        model, _optimizer = trained(FP8Config(), policies[name], layers)
        if count == 1:
            model.set_custom_reduce_scatter(DefaultReduceScatter())
        retain = count >= 512  # one forward, whose gathered weights stay, is faster
        model.set_reshard_after_backward(not retain)
        loss = None
        for i in range(count):
            model.set_requires_gradient_sync(name == "sharded" or i == count - 1)
            if loss is None or not retain or i == count - 1:
                loss = loss_of(model, batch(0))
            loss.backward(retain_graph=retain)
        model.reshard()
        grads = [p.grad.to_local().double() for p in model.parameters()]
        exact = exact or grads
        pairs = [(grad, of_one * count) for grad, of_one in zip(grads, exact, strict=True)]
        result[f"{name} {count}"] = worst_sum(pairs)
    return result


def case_one_rank():
    result = {}
    for level, policy in (("O1", BF16), ("O2", None), ("O3", BF16)):
        config = FP8Config(opt_level=level)
        # Each rank trains alone one of the runs.
        alone = [averaged(loss) for loss in _losses(*_alone(config), 8 * RANK, range(RANKS))]
        runs = [
            [averaged(x) for x in _losses(*trained(config, policy, _model()), first, (RANK,))]
            for first in range(0, 8 * RANKS, 8)
        ]
        result[level] = [[sum(losses) / RANKS for losses in zip(*runs, strict=True)], alone]
    return result


def _model():
    return model_of(hidden=99)


def _alone(config):
    model = _model()
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    convert_optimizer(optimizer, config, model=model)
    return model, optimizer


def _losses(model, optimizer, first, ranks):
    """Losses of 8 steps from `first` on, with the data of `ranks`."""
    return [float(train(model, optimizer, [first + step], ranks)) for step in range(8)]
