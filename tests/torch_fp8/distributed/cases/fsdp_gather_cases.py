"""Weights that FSDP2 gathers in FP8; run by run_cases.py."""

import copy
import io
import pickle
import warnings

import torch
from fsdp_ranks import (
    BF16,
    RANK,
    RANKS,
    attached,
    batch,
    loss_of,
    model_of,
    reshard,
    sharded,
    unshard,
    weights_of,
)
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import Shard

from tests.internals import WEIGHT, UnshardedFloat8Weight
from tests.steps import renew_scales
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.distributed import connect_fsdp
from torch_fp8.ops.quantize import quantize


def case_bits():
    result = {}
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"):
        for policy in (None, BF16):
            config = FP8Config(recipe=recipe, opt_level="O1", emulate=True)
            hidden = 203 if recipe == "blockwise" else 33
            plain, model = model_of(hidden=hidden), model_of(hidden=hidden)
            with torch.no_grad():  # blocks and rows differ
                for parameter in (*plain.parameters(), *model.parameters()):
                    if parameter.ndim == 2:
                        parameter.mul_(2.0 ** torch.linspace(-8, 8, len(parameter))[:, None])
            model, report = sharded(config, policy, model)
            with torch.no_grad():
                for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                    p.mul_(3)
                    q.mul_(3)
            unshard(model)
            same = []
            for name, weight in weights_of(model).items():
                spec = model.get_submodule(name).fp8.recipe.weight
                exact = plain.get_submodule(name).weight.detach()
                whole = quantize(exact, spec)
                same.append(
                    torch.equal(whole.qdata.view(torch.uint8), weight.qdata.view(torch.uint8))
                    and torch.equal(whole.scale, weight.rowwise().scale)
                    and weight.dtype == (torch.bfloat16 if policy else torch.float32)
                )
            key = f"{recipe} {'bf16' if policy else 'fp32'}"
            result[key] = [report.num_gathers, len(same), all(same)]
    return result


def case_freed():
    result = {}
    for recipe in ("tensorwise", "mxfp8"):
        for after_forward in (True, False):
            config = FP8Config(recipe=recipe, opt_level="O1", emulate=True)
            model, _ = sharded(config, reshard_after_forward=after_forward)
            unshard(model)
            payloads = [w.payload for w in weights_of(model).values()]
            storages = {
                t.untyped_storage() for p in payloads for t in (p.qdata, p.scale) if t.numel() > 1
            }

            def held(storages=tuple(storages)):
                return sum(storage.size() for storage in storages)

            whole = held()
            loss = loss_of(model, batch(0))
            forward = held()
            loss.backward()
            numel = sum(p.qdata.numel() for p in payloads)
            reads = "nothing"
            try:
                UnshardedFloat8Weight(payloads[0], torch.float32).sum()
            except RuntimeError as error:
                reads = str(error)
            result[f"{recipe} {after_forward}"] = [whole / numel, forward / numel, held(), reads]
    return result


def case_nonfinite():
    result = {}
    for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8"):
        for bad in (torch.inf, torch.nan):
            config = FP8Config(recipe=recipe, opt_level="O1", emulate=True)
            model, _ = sharded(config)
            if RANK == RANKS - 1:
                model[1].down.weight._local_tensor[0, 0] = bad
            unshard(model)
            weight = model[1].down.weight.dequantize()
            result[f"{recipe} {bad}"] = int(weight.isnan().sum())
            reshard(model)
    model, _ = sharded(FP8Config(opt_level="O1"))
    x = batch(0)
    if RANK == 0:
        x[0, 0] = torch.nan
    loss_of(model, x).backward()
    result["gradients"] = [
        bool(p.grad.to_local().isnan().any()) for p in model.parameters() if p.to_local().numel()
    ]
    return result


def case_options():
    config = FP8Config(opt_level="O1")
    result = {}

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
            self.out.weight, self.two.weight = self.embedding.weight, self.one.weight

        def forward(self, x):
            return self.out(self.two(self.one(self.embedding(x))))

    torch.manual_seed(0)
    model = Tied()
    plain = Tied()
    plain.load_state_dict(model.state_dict())
    for made in (model, plain):
        convert_to_float8(made, config)
    fully_shard(model)
    report = connect_fsdp(model, config)
    x = torch.arange(8).view(1, 8) + RANK
    losses = [float(loss_of(made, x)) for made in (model, plain)]
    result["tied"] = [report.num_gathers, *losses]

    model = Tied()
    some = FP8Config(opt_level="O1", skip=("two",))
    convert_to_float8(model, some)
    fully_shard(model)
    report = connect_fsdp(model, some)
    loss_of(model, x).backward()
    result["tied to a plain layer"] = [report.num_gathers, str(report)]

    frozen = model_of()
    for parameter in frozen[1].parameters():
        parameter.requires_grad_(False)
    model, report = sharded(config, BF16, frozen)
    loss_of(model, batch(0)).backward()
    grads = {n for n, p in model.named_parameters() if p.grad is not None}
    some = model_of()
    some[1].up.requires_grad_(False)
    model, _ = sharded(config, BF16, some)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_of(model, batch(0)).backward()
    missing = sum("got no gradient" in str(w.message) for w in caught)
    result["frozen"] = [report.num_gathers, sum(n.startswith("1.") for n in grads), missing]

    model, report = sharded(config, reshard_after_forward=2 if RANKS > 2 else True)
    loss_of(model, batch(0)).backward()
    result["number"] = [report.num_gathers, report.num_scatters, str(report)]

    model, report = sharded(FP8Config(opt_level="O1", communication="off"))
    loss_of(model, batch(0)).backward()
    result["off"] = [report.num_gathers, report.num_scatters, len(weights_of(unshard(model)))]
    reshard(model)
    result["on again"] = [connect_fsdp(model, config).num_gathers, len(weights_of(unshard(model)))]

    model, _ = sharded(config, connected=False)
    own = DefaultReduceScatter()
    own.__class__ = type("Own", (DefaultReduceScatter,), {})
    model[1].set_custom_reduce_scatter(own)
    report = connect_fsdp(model, config)
    connect_fsdp(model, FP8Config(opt_level="O1", communication="off"))
    kept = model[1]._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm is own
    root = model._get_fsdp_state()._fsdp_param_group
    stock = type(root._reduce_scatter_comm) is DefaultReduceScatter
    result["users scatter"] = [report.num_gathers, report.num_scatters, str(report), kept, stock]

    sharding = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    made = {}
    for recipe in ("tensorwise", "rowwise"):
        recipe_config = FP8Config(opt_level="O1", recipe=recipe, emulate=True)
        model, report = sharded(recipe_config, **sharding)
        alone = model_of()
        convert_to_float8(alone, recipe_config)
        losses = [loss_of(one, batch(0)) for one in (model, alone)]
        losses[0].backward()
        losses = [float(loss) for loss in losses]
        made[recipe] = [report.num_gathers, str(report), *losses]
    result["second dimension"] = made

    model, report = sharded(config, offload_policy=CPUOffloadPolicy(pin_memory=False))
    local = model[1].up.weight._local_tensor
    moved = local.to(torch.float64)
    loss_of(model, batch(0)).backward()
    inputs, _ = moved.fsdp_pre_all_gather(None, None, None, None, None)
    result["offload"] = [
        report.num_gathers,
        str(inputs[0].dtype),
        moved is local,
        local.to("cpu") is local,
    ]
    return result


def case_delayed():
    """The scale comes from the history, and the amax of the whole weight goes into it; ranks that
    see the same batch agree on the scales of one device.
    """
    config = FP8Config(recipe="delayed", opt_level="O1", amax_history_len=4)
    model, _ = sharded(config)
    alone = model_of()
    convert_to_float8(alone, config)
    result = []
    for step in range(3):
        layers = (model[1].up, alone[1].up)
        with torch.no_grad():
            for one in (model, alone):
                for parameter in one.parameters():
                    parameter.mul_(1.5)
        for one in (model, alone):
            one.zero_grad()
            loss_of(one, batch(step)).backward()
        renew_scales()
        histories = [layer.fp8_amax_history[WEIGHT] for layer in layers]
        scales = [layer.fp8_scales[WEIGHT, 0] for layer in layers]
        result.append([torch.equal(*histories), torch.equal(*scales)])
    unshard(model)
    scale = model[1].up.weight.scale
    reshard(model)
    return [*result, float(scale / scales[0])]


def case_copies():
    model, _ = sharded(FP8Config(opt_level="O1"))
    parameter = model[1].up.weight
    shard = parameter._local_tensor
    buffer = io.BytesIO()
    torch.save({"shard": shard, **model.state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    copies = [copy.deepcopy(shard), copy.deepcopy(parameter)._local_tensor, loaded["shard"]]
    copies += [v._local_tensor for k, v in loaded.items() if k != "shard"]
    still_attached = attached(model)
    unshard(model)
    gathered = model[1].up.weight
    written = "nothing"
    try:
        with torch.no_grad():
            gathered.mul_(2)
    except RuntimeError as error:
        written = str(error)
    return {
        "plain": [type(c) is torch.Tensor and not c.__dict__ for c in copies],
        "equal": torch.equal(copies[0], shard),
        "attached": still_attached,
        "gathered": [
            type(copy.deepcopy(gathered)).__name__,
            bool(torch.equal(pickle.loads(pickle.dumps(gathered)), gathered.dequantize())),
            torch.equal(gathered.detach().view(gathered.shape) + 0, gathered.dequantize()),
        ],
        "written": written,
    }
