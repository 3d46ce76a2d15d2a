"""Frozen experts on two ranks, below adapters, by DDP and FSDP2."""

import os

import torch
import torch.distributed as dist
from moe_cases import _batch, _Block, _loaded, _pass, _saved
from parallel_ranks import RANKS, db, full
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.comm_counter import count_communication
from tests.internals import Float8Experts, Float8FrozenWeight, local
from tests.moe_experts import CLASSES, experts
from torch_fp8 import FP8Config, convert_to_float8, memory_report, thaw
from torch_fp8.distributed import connect_fsdp, ddp_options


def _adapted(layout, frozen=True):
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    block = _Block(layout).bfloat16()
    targets = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]
    targets = [t for t in targets if hasattr(block.experts, t.partition(".")[2])]
    inject_adapter_in_model(LoraConfig(target_parameters=targets, r=8, lora_alpha=8), block)
    for name, parameter in block.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.1)
            parameter.data = parameter.data.bfloat16()
    rule = {} if frozen else {"frozen_weights": "keep"}
    return block, FP8Config(recipe="rowwise", **rule)


def _experts_of(block):
    return next(m for m in block.modules() if isinstance(m, Float8Experts))


def _trained_adapters(block, wrapped):
    optimizer = torch.optim.SGD([p for p in block.parameters() if p.requires_grad], lr=0.01)
    outputs = []
    for seed in range(2):
        y, _ = _pass(wrapped, seed)
        outputs.append(y)
        if wrapped is block and not isinstance(block, FSDPModule):
            for p in block.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= RANKS
        optimizer.step()
        optimizer.zero_grad()
    adapters = [full(p.detach()).float() for n, p in block.named_parameters() if "lora" in n]
    return outputs, adapters


def _frozen(layout, wrap):
    """Return what LoRA over frozen experts has in common with one process's, and bytes."""
    (whole, config), (block, _), (plain, kept) = (
        _adapted(layout),
        _adapted(layout),
        _adapted(layout, frozen=False),
    )
    for one, options in ((whole, config), (block, config), (plain, kept)):
        report = convert_to_float8(one, options)
        assert len(report.frozen.frozen) == (0 if one is plain else 2), report.frozen
    wrapped, connected = wrap(block, config)
    before, _ = wrap(plain, kept)
    held = [local(w) for w in _experts_of(block)._parameters.values() if local(w).ndim == 3]
    bytes_held = sum(w.payload.num_bytes for w in held if isinstance(w, Float8FrozenWeight))
    numel = sum(local(w).numel() for w in held)
    weights = memory_report(block).weights, memory_report(plain).weights
    want, want_adapters = _trained_adapters(whole, whole)
    with count_communication() as count:
        got, adapters = _trained_adapters(block, wrapped)
    with count_communication() as plain_count:
        _trained_adapters(plain, before)
    gathers = [c.of("all-gather").bytes_sent for c in (count, plain_count)]
    return {
        "same": [torch.equal(a, b) for a, b in zip(want, got, strict=True)],
        "adapters": min(db(a, b) for a, b in zip(want_adapters, adapters, strict=True)),
        "bytes": bytes_held / numel,
        "weights": weights,
        "numel": numel,
        "gathers": gathers,
        "frozen": connected.num_frozen if connected is not None else 2,
    }


def _by_fsdp(block, config):
    fully_shard(block, reshard_after_forward=True)
    return block, connect_fsdp(block, config)


def _by_ddp(block, config):
    ddp = DistributedDataParallel(block, **ddp_options(block, []))
    return ddp, None


def case_frozen_fsdp():
    layouts = CLASSES if "EVERY_LAYOUT" in os.environ else ("plain", "gpt-oss", "no-gate")
    return {layout: _frozen(layout, _by_fsdp) for layout in layouts}


def case_frozen_ddp():
    return {layout: _frozen(layout, _by_ddp) for layout in ("plain", "gpt-oss")}


def case_frozen_later():
    (block, config), (alone, _) = _adapted("plain"), _adapted("plain")
    values = {n: p.detach().clone() for n, p in block.named_parameters()}
    convert_to_float8(alone, config)
    fully_shard(block, reshard_after_forward=True)
    report = convert_to_float8(block, config)
    connect_fsdp(block, config)
    held = [local(w) for w in _experts_of(block)._parameters.values()]
    states = get_model_state_dict(block, options=StateDictOptions(full_state_dict=True))
    saved = {n: v for n, v in states.items() if v.ndim == 3}
    agreement = min(db(values[n].float(), v.float()) for n, v in saved.items())
    set_model_state_dict(block, states, options=StateDictOptions(full_state_dict=True))
    y, want = _pass(block, 0)[0], _pass(alone, 0)[0]
    refused = ""
    try:
        thaw(block)
    except RuntimeError as error:
        refused = str(error)
    frozen = sum(isinstance(w, Float8FrozenWeight) for w in held)
    return len(report.frozen.frozen), frozen, agreement, torch.equal(y, want), refused


def case_not_frozen():
    """Three experts on two ranks stay in BF16, and the report says why."""
    torch.manual_seed(0)
    block = nn.Sequential(experts("plain", num_experts=3, num_local_experts=3)).bfloat16()
    block.requires_grad_(False)
    fully_shard(block)
    report = convert_to_float8(block, FP8Config(recipe="rowwise", frozen_weights="fp8"))
    return len(report.frozen.frozen), sorted({reason for _, reason in report.frozen.kept})


def case_parallel_not_frozen():
    from transformers.distributed import DistributedConfig

    distributed = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS)
    model = _loaded(_saved(), distributed_config=distributed).requires_grad_(False)
    report = convert_to_float8(model, FP8Config(recipe="rowwise", frozen_weights="fp8"))
    kept = [(name, reason) for name, reason in report.frozen.kept if "experts" in name]
    held = [local(p) for p in model.parameters() if p.ndim == 3]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=_batch(), labels=_batch()).loss
    return kept, sum(isinstance(w, Float8FrozenWeight) for w in held), float(loss)
