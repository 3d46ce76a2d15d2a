"""Experts on two ranks that a monitor, a replay and ``auto`` look at."""

import torch
from moe_cases import _batch, _loaded, _saved, _train
from parallel_ranks import RANK, RANKS, full
from torch.nn.parallel import DistributedDataParallel

from accelerate_fp8 import record_routing, routing_replay
from tests.moe_experts import E, H, K, experts
from torch_fp8 import FP8Config, Monitor, convert_to_float8
from torch_fp8.distributed import connect_fsdp, split_sharded


def case_monitored():
    torch.manual_seed(0)
    config = FP8Config(recipe="rowwise", opt_level="O1", monitor=1)
    block, logged = experts(), {}
    convert_to_float8(block, config)
    ddp = DistributedDataParallel(block)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-4)
    log = lambda series, step: logged.update({step: series})  # noqa: E731
    monitor = Monitor(block, [optimizer], config, log=log, ddp=lambda: ddp)
    x, scores = torch.randn(64, H), torch.full((64, K), 1 / K)
    for choice in ([2 * RANK, 2 * RANK + 1], [0, 2 * RANK]):
        index = torch.tensor(choice).expand(64, K)
        with torch.autocast("cpu", torch.bfloat16):
            y = ddp(x, index, scores)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    place = "fp8/experts/"
    tokens = [logged[i][f"{place}tokens_least"] for i in (1, 2)]
    empty = [logged[i][f"{place}empty"] for i in (1, 2)]
    return tokens, empty, logged[2][f"{place}tokens_most"], monitor.events[-1]["what"]


def _monitored(**options):
    from transformers.distributed import DistributedConfig

    config, logged = FP8Config(recipe="rowwise", monitor=1), {}
    model = _loaded(_saved(), distributed_config=DistributedConfig(**options))
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    split_sharded(model, [optimizer], config)
    connect_fsdp(model, config)

    def log(series, step):
        logged.update(series)

    monitor = Monitor(model, [optimizer], config, log=log)
    _train(model, optimizer, [_batch().chunk(RANKS)[RANK]])
    monitor.close()
    assert not monitor._events.has_failed
    return {name: value for name, value in logged.items() if "experts" in name}


def case_monitored_sharded():
    return _monitored(fsdp_size=RANKS)


def case_monitored_parallel():
    return _monitored(fsdp_size=RANKS, ep_size=RANKS)


def _replayed(**options):
    """Return what a replay of a sharded model has in common with what it replays."""
    from transformers.distributed import DistributedConfig

    config = FP8Config(recipe="rowwise")
    model = _loaded(_saved(), distributed_config=DistributedConfig(**options))
    convert_to_float8(model, config)
    connect_fsdp(model, config)
    ids = _batch().chunk(RANKS)[RANK]

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    with record_routing(model) as record:
        want = loss()
    indices = record.indices(len(ids))
    with routing_replay(model, indices) as same:
        got = loss()
        got.backward()
    router = model.model.layers[0].mlp.gate
    grad = float(full(router.weight.grad).abs().sum())
    with routing_replay(model, (indices + 1) % E) as other:
        changed = loss()
    return float(want), float(got), same.share(), grad, other.share(), float(changed)


def case_replayed_sharded():
    return _replayed(fsdp_size=RANKS)


def case_replayed_parallel():
    return _replayed(fsdp_size=RANKS, ep_size=RANKS)
