"""Runs each case on one of several gloo ranks and writes, as JSON, what it returns or how it fails.

Started by test_fsdp_communication.py:
``python fsdp_cases.py <rank> <number of ranks> <store> <result>``.
"""

import datetime
import json
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torch_fp8 import FP8Config, convert_to_float8, count_communication
from torch_fp8.fsdp_communication import connect_fsdp
from torch_fp8.gathered_weight import GatheredWeight
from torch_fp8.quantize import quantize

RANK, RANKS = (int(arg) for arg in sys.argv[1:3])
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model_of(seed=0, hidden=96):
    """Two blocks, of which one has uneven shards, between a first and a last layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, 64), Block(64, hidden), Block(64, 48), nn.Linear(64, 8, bias=False)
    )


def sharded(config, policy=None, model=None, mesh=None, connected=True, **options):
    model = model_of() if model is None else model
    mesh = init_device_mesh("cpu", (RANKS,)) if mesh is None else mesh
    options = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy(), **options}
    convert_to_float8(model, config)
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, **options)
    fully_shard(model, **options)
    return model, connect_fsdp(model, config) if connected else None


def batch(step, ranks=(RANK,)):
    made = [
        torch.randn(8, 32, generator=torch.Generator().manual_seed(9 * step + r)) for r in ranks
    ]
    return torch.cat(made)


def loss_of(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def weights_of(model):
    """The gathered weights, by name."""
    named = (
        (n, m._parameters["weight"]) for n, m in model.named_modules() if "weight" in m._parameters
    )
    return {n: w for n, w in named if isinstance(w, GatheredWeight)}


def averaged(value):
    value = torch.tensor(float(value))
    dist.all_reduce(value)
    return value.item() / RANKS


def case_bits():
    """The gathered bytes and scales against a cast of the whole; uneven shards of 33 rows."""
    result = {}
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"):
        for policy in (None, BF16):
            config = FP8Config(recipe=recipe, opt_level="O1", emulate=True)
            plain, model = model_of(hidden=33), model_of(hidden=33)
            model, report = sharded(config, policy, model)
            same = []
            with torch.no_grad():
                for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                    p.mul_(3)
                    q.mul_(3)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
            for name, weight in weights_of(model).items():
                spec = model.get_submodule(name).fp8_recipe.weight
                whole = quantize(plain.get_submodule(name).weight.detach(), spec)
                bits = torch.equal(
                    whole.qdata.view(torch.uint8), weight.qdata.view(torch.uint8)
                ) and torch.equal(whole.scale, weight.scale)
                same.append(bits and weight.dtype == (torch.bfloat16 if policy else torch.float32))
            result[f"{recipe} {'bf16' if policy else 'fp32'}"] = [
                report.num_gathers,
                len(same),
                all(same),
            ]
    return result


def case_freed():
    """Bytes of payloads and aliases, unsharded, after forward and after backward."""
    result = {}
    for after_forward in (True, False):
        config = FP8Config(opt_level="O1")
        model, _ = sharded(config, reshard_after_forward=after_forward)
        model.unshard()
        for block in model:
            if isinstance(block, FSDPModule):
                block.unshard()
        weights = weights_of(model).values()

        def held(weights=tuple(weights)):
            return sum(w.qdata.untyped_storage().size() for w in weights)

        whole = held()
        loss = loss_of(model, batch(0))
        forward = held()
        loss.backward()
        result[str(after_forward)] = [whole, sum(w.numel() for w in weights), forward, held()]
    return result


def case_one_rank():
    """Losses of N ranks, and of one with all of their data."""
    result = {}
    for level, policy in (("O1", None), ("O1", BF16)):
        config = FP8Config(opt_level=level)
        model, _ = sharded(config, policy)
        alone = model_of()
        convert_to_float8(alone, config)
        losses = []
        for one, ranks in ((model, (RANK,)), (alone, range(RANKS))):
            optimizer = torch.optim.AdamW(one.parameters(), lr=3e-3)
            made = []
            for step in range(8):
                loss = loss_of(one, batch(step, ranks))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                made.append(averaged(loss))
            losses.append(made)
        result[f"{level} {'bf16' if policy else 'fp32'}"] = losses
    return result


def case_bytes():
    """Of one step; the stock collectives, and ours."""
    result = {}
    for communication in ("off", "fp8"):
        config = FP8Config(opt_level="O1", communication=communication)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
        model, _ = sharded(config, BF16, model)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(4, 256)).square().mean().backward()
        with count_communication() as count, torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(4, 256)).square().mean().backward()
        result[communication] = [[r.kind, str(r.dtype), r.calls, r.bytes_sent] for r in count.rows]
    return result


def main():
    rank, store, output = RANK, *sys.argv[3:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=120),
    )
    results = {}
    for name, case in list(globals().items()):
        if not name.startswith("case_"):
            continue
        try:
            results[name.removeprefix("case_")] = {"value": case()}
        except Exception:
            results[name.removeprefix("case_")] = {"error": traceback.format_exc()}
            break  # the other ranks may be elsewhere now
    with open(output, "w") as file:
        json.dump(results, file)
    sys.stdout.flush()
    os._exit(0)  # gloo may hang at exit


if __name__ == "__main__":
    main()
