"""Checkpoints of sharded models, saved by some ranks and loaded by others; run by run_cases.py.

``FSDP_FOLDER`` is where they are. Two ranks train and save, and take one more step, whose gradients
anybody can make again: what four ranks, two or one have after this step must be that, to the bit.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_ranks import BF16, RANK, RANKS, attached, model_of, train, trained
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.internals import join_weight, local
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import split_sharded

FOLDER = Path(os.environ["FSDP_FOLDER"])
LEVELS = ("O1", "O2", "O3")
WHOLE = {4: "O2", 2: "O3", 1: "O1"}  # number of ranks -> the level of a whole checkpoint
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def made(level):
    return trained(FP8Config(opt_level=level), BF16, model_of(hidden=99))


def known_step(model, optimizer):
    for i, parameter in enumerate(model.parameters()):
        grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
        grad = grad.to(parameter.dtype)
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
        parameter.grad = grad
    optimizer.step()
    optimizer.zero_grad()


def weights(model):
    joined = {}
    for name, parameter in model.named_parameters():
        shard = join_weight(parameter)
        if isinstance(parameter, DTensor):
            whole = DTensor.from_local(
                shard.view(local(parameter).shape),
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            shard = whole.full_tensor()
        joined[name] = shard.view(parameter.shape).detach().clone()
    return joined


def save(model, optimizer, name):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=FOLDER / name)


def load(model, optimizer, name, **options):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=FOLDER / name, **options)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def same(weights, name):
    expected = torch.load(FOLDER / f"{name}.pt")
    return [key for key, value in expected.items() if not torch.equal(weights[key], value)]


def case_1_save():
    for level in LEVELS:
        model, optimizer = made(level)
        train(model, optimizer, range(2))
        save(model, optimizer, f"2 {level}")
        whole = get_state_dict(model, optimizer, options=FULL)
        before = weights(model)
        known_step(model, optimizer)
        after = weights(model)
        if RANK == 0:
            torch.save(whole, FOLDER / f"whole {level}.pt")
            torch.save(before, FOLDER / f"before {level}.pt")
            torch.save(after, FOLDER / f"after {level}.pt")
        dist.barrier()
    model, optimizer = made("O1")
    train(model, optimizer, range(3))
    save(model, optimizer, "2 stock")
    return attached(model)


def case_2_resume():
    result = {}
    saved = 4 if RANKS == 2 else 2
    for level in LEVELS:
        # A whole one is the same file for all: another level on each number of ranks.
        for kind in ("sharded", "whole") if level == WHOLE[RANKS] else ("sharded",):
            model, optimizer = made(level)
            if kind == "sharded":
                load(model, optimizer, f"{saved} {level}")
            else:
                whole = ({}, {})
                if RANK == 0:
                    whole = torch.load(FOLDER / f"whole {level}.pt", weights_only=True)
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_model_state_dict(model, whole[0], options=options)
                set_optimizer_state_dict(model, optimizer, whole[1], options=options)
            before = same(weights(model), f"before {level}")
            if kind == "sharded" and RANKS == 4:
                save(model, optimizer, f"4 {level}")
            known_step(model, optimizer)
            after = same(weights(model), f"after {level}")
            train(model, optimizer, [9])
            result[f"{level} {kind}"] = [before, after]
    return result


def case_3_stock_to_ours():
    model, optimizer = made("O2")
    load(model, optimizer, "2 stock")
    stock, of_stock = made("O1")
    load(stock, of_stock, "2 stock")
    pairs = zip(model.parameters(), stock.parameters(), strict=True)
    exact = all(torch.equal(local(p), local(q)) for p, q in pairs)
    known_step(model, optimizer)
    known_step(stock, of_stock)
    far = 0.0
    expected = weights(stock)
    for key, value in weights(model).items():
        far = max(far, float((value - expected[key]).norm() / expected[key].norm()))
    converted, of_converted = made("O1")
    load(converted, of_converted, "2 stock")
    split_sharded(converted, [of_converted], FP8Config(opt_level="O2"))
    converted_far = 0.0
    known_step(converted, of_converted)
    for key, value in weights(converted).items():
        distance = (value - expected[key]).norm() / expected[key].norm()
        converted_far = max(converted_far, float(distance))
    train(converted, of_converted, [9])
    return [exact, far, converted_far, attached(converted)]


def case_4_alone():
    result = {}
    for level in ("O2", "O3"):
        for kind in ("ours", "stock"):
            model = model_of(hidden=99)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            if kind == "ours":
                config = FP8Config(opt_level=level)
                convert_to_float8(model, config)
                convert_optimizer(optimizer, config, model=model)
            load(model, optimizer, f"2 {level}")
            far = []
            for when in ("before", "after"):
                expected = torch.load(FOLDER / f"{when} {level}.pt")
                of_kind = {True: 0.0, False: 0.0}
                for key, value in weights(model).items():
                    large = value.numel() >= 4096
                    distance = (value - expected[key]).norm() / expected[key].norm()
                    of_kind[large] = max(of_kind[large], float(distance))
                far.append([of_kind[True], of_kind[False]])
                known_step(model, optimizer)
            result[f"{level} {kind}"] = far
    return result
