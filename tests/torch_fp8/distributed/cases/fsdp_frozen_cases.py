"""Frozen weights held in FP8 alone under FSDP2; run by run_cases.py."""

import copy

import torch
from fsdp_ranks import RANKS, Block, batch, loss_of, model_of, reshard, unshard, weights_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.comm_counter import count_communication
from tests.internals import Float8FrozenWeight
from torch_fp8 import FP8Config, convert_to_float8, freeze, memory_report
from torch_fp8.distributed import connect_fsdp


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.base = layer
        self.low = nn.Linear(layer.in_features, 4, bias=False)
        self.high = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.high(self.low(x))


CONFIG = FP8Config(recipe="tensorwise", frozen_weights="fp8", skip=("low", "high"))


def adapted(hidden=96):
    model = model_of(hidden=hidden)
    for block in model:
        if isinstance(block, Block):
            block.requires_grad_(False)
            block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def shard(model, config=CONFIG, **options):
    report = convert_to_float8(model, config)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return report, connect_fsdp(model, config)


def frozen_shards(model):
    shards = (p._local_tensor for p in model.parameters() if isinstance(p, DTensor))
    return [s for s in shards if isinstance(s, Float8FrozenWeight)]


def case_trains():
    result = {}
    for name, hidden in (("aligned", 256), ("uneven", 97)):
        alone = adapted(hidden)
        model = copy.deepcopy(alone)
        convert_to_float8(alone, CONFIG)
        report, connected = shard(model)
        held = frozen_shards(model)
        payload = sum(s.qdata.untyped_storage().nbytes() for s in held)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
        losses = []
        for step in range(3):
            of_both = []
            for one, optimizer in zip((model, alone), optimizers, strict=True):
                loss = loss_of(one, batch(step, (0,)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                of_both.append(float(loss))
            losses.append(of_both)
        unshard(model)
        of_whole = {n: w for n, w in weights_of(model).items() if "base" in n}
        equal = [
            torch.equal(
                w.payload.qdata.view(torch.uint8),
                alone.get_submodule(n).weight.qdata.view(torch.uint8),
            )
            for n, w in of_whole.items()
        ]
        reshard(model)
        result[name] = {
            "frozen": len(report.frozen.frozen),
            "held": [len(held), connected.num_frozen],
            "bytes": [payload, sum(s.numel() for s in held)],
            "memory": memory_report(model).weights,
            "losses": losses,
            "equal": equal,
            "again": connect_fsdp(model, CONFIG).num_frozen,
            "kept": len(frozen_shards(model)),
        }
    return result


def case_later():
    alone = model_of()
    model = copy.deepcopy(alone)
    config = FP8Config(recipe="tensorwise")
    _, connected = shard(model, config)
    before = memory_report(model).weights
    report = freeze(model)
    freeze(alone, config)
    return {
        "frozen": [connected.num_frozen, len(report.frozen), len(frozen_shards(model))],
        "bytes": [before, memory_report(model).weights, report.num_params],
        "losses": [float(loss_of(one, batch(0))) for one in (model, alone)],
        "gathered": memory_report(model).weights,
    }


def case_wire():
    counts = {}
    for frozen in ("fp8", "keep"):
        config = FP8Config(
            recipe="tensorwise", frozen_weights=frozen, communication="off", skip=("low", "high")
        )
        model = adapted(256)
        shard(model, config)
        with torch.no_grad(), count_communication() as count:
            model(batch(0))
        counts[frozen] = count.payload_bytes
    return counts


def case_state():
    alone = adapted(97)
    model = copy.deepcopy(alone)
    convert_to_float8(alone, CONFIG)
    shard(model)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    expected = alone.state_dict()
    kinds = sorted({type(v).__name__ for v in state.values()})
    equal = [torch.equal(state[name], expected[name]) for name in expected]
    own = model.state_dict()
    locals_ = sorted({type(v.to_local()).__name__ for v in own.values()})
    model.load_state_dict(own)
    other = {n: v * 2 for n, v in own.items()}
    before = [shard.qdata.clone() for shard in frozen_shards(model)]
    model.load_state_dict(own)
    kept = [
        torch.equal(shard.qdata.view(torch.uint8), old.view(torch.uint8))
        for shard, old in zip(frozen_shards(model), before, strict=True)
    ]
    model.load_state_dict(other)
    alone.load_state_dict({n: v * 2 for n, v in expected.items()})
    written = get_model_state_dict(model, options=options)
    same = [torch.equal(written[name], value) for name, value in alone.state_dict().items()]
    losses = [float(loss_of(one, batch(0))) for one in (model, alone)]
    with torch.no_grad():
        for one in (model, alone):
            for part in one.modules():
                if isinstance(part, Adapted):
                    part.base.weight.mul_(0.3).add_(1.0)
    losses += [float(loss_of(one, batch(0))) for one in (model, alone)]
    another = adapted(97)
    shard(another)
    reshard(model)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), another.parameters(), strict=True):
            mine.copy_(theirs)
    losses += [float(loss_of(one, batch(0))) for one in (model, another)]
    return [kinds, all(equal), locals_, len(frozen_shards(model)), all(kept), all(same), losses]


def case_offload_and_move():
    result = {}
    model = adapted(97)
    shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    alone = adapted(97)
    convert_to_float8(alone, CONFIG)
    result["offload"] = [
        *(float(loss_of(one, batch(0))) for one in (model, alone)),
        len(frozen_shards(model)),
    ]
    model = adapted(97)
    shard(model)
    model.to(torch.float32)
    model._apply(lambda t: t.clone())
    result["moved"] = [float(loss_of(model, batch(0))), len(frozen_shards(model))]
    model.eval()
    with torch.no_grad():
        result["evaluated"] = float(loss_of(model, batch(0)))
    try:
        next(m for m in model.modules() if isinstance(m, Adapted)).base.weight.requires_grad_(True)
        loss_of(model, batch(0))
        result["error"] = None
    except RuntimeError as refused:
        result["error"] = str(refused)
    return result
