"""Loss heads on two gloo ranks under DDP and FSDP2; run by run_cases.py."""

import copy
import functools

import torch
import torch.nn.functional as F
from run_cases import RANK, RANKS, equal_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.internals import defer_logits, logit_losses, sqnr_db
from tests.torch_fp8.loss_head.compiled_graphs import Graphs
from tests.torch_fp8.loss_head.logits_cases import CHUNK, LanguageModel, Largest, V, batch
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8.distributed import connect_fsdp, split_sharded

logit_losses.linear_cross_entropy = functools.partial(
    logit_losses.linear_cross_entropy, chunk=CHUNK
)
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class WithLoss(LanguageModel):
    """Returns the loss beside its logits, as models of transformers do."""

    def forward(self, tokens, labels=None):
        logits = super().forward(tokens)
        loss = None if labels is None else _loss(logits, labels)
        return {"loss": loss, "logits": logits}


def _loss(logits, labels):
    return F.cross_entropy(logits.float().view(-1, V), labels.view(-1))


def _in_model(model, tokens, labels):
    return model(tokens, labels)["loss"]


def _outside(model, tokens, labels):
    return _loss(model(tokens)["logits"], labels)


def _steps(model, loss_of, optimizer=None, autocast=True):
    """Losses, the first gradients, and the largest tensor of two steps."""
    losses, grads = [], {}
    for seed in range(2):
        with Largest() as largest:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model, *batch(10 * seed + RANK))
            loss.backward()
        losses.append(loss.detach())
        if not grads:
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                if grad is None:
                    continue
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                grads[name.removeprefix("module.")] = grad.detach().to_dense().float().clone()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), grads, largest.numel


def _compared(wrap, loss_of, tied=False, **options):
    """The largest difference of losses, the least SQNR of a gradient of the head, and so on."""
    torch.manual_seed(0)
    made = []
    model = WithLoss(tied=tied)
    for loss_head in ("off", "bf16"):
        config = FP8Config("tensorwise", loss_head=loss_head, opt_level="O1", **options)
        made.append(_steps(*wrap(copy.deepcopy(model), config, loss_of)))
    (want, want_grads, _), (losses, grads, numel) = made
    names = [name for name in grads if not name.startswith("inner")]
    return {
        "loss": float(((losses - want) / want).abs().max()),
        "db": min(sqnr_db(want_grads[name], grads[name]) for name in names),
        "equal": equal_on_ranks(list(grads.values())),
        "fused": numel < 96 * V,
    }


def _ddp(model, config, loss_of, **options):
    convert_to_float8(model, config)
    return DistributedDataParallel(model, **options), loss_of


def case_ddp():
    results = {}
    for option in (None, "find_unused_parameters", "static_graph"):
        for loss_of in (_in_model, _outside):
            wrap = functools.partial(_ddp, **({} if option is None else {option: True}))
            results[f"{option} {loss_of.__name__}"] = _compared(wrap, loss_of)
    results["tied"] = _compared(_ddp, _outside, tied=True)
    return results


def case_compiled_ddp():
    """DDP inside and outside of a compiled model: losses, gradients, and the graphs' tensors."""
    results = {}
    for order in ("compile(DDP)", "DDP(compile)"):
        found = []
        for loss_head in ("off", "bf16"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            graphs, model = Graphs(), WithLoss()
            compile_ = functools.partial(torch.compile, backend=graphs.backend)
            config = FP8Config("tensorwise", loss_head=loss_head, opt_level="O1")
            convert_to_float8(model, config)
            if order == "compile(DDP)":
                model = compiled = compile_(DistributedDataParallel(model))
            else:
                compiled = compile_(model)
                model = DistributedDataParallel(compiled)
            defer_logits(compiled)
            with torch.autocast("cpu", torch.bfloat16):
                output = model(*batch(RANK))
            output["loss"].backward()
            grads = [p.grad.float() for p in model.parameters()]
            found.append((output["loss"].detach(), grads, graphs.numel, output["logits"]))
        (want, want_grads, *_), (loss, grads, numel, logits) = found
        results[order] = {
            "loss": float(((loss - want) / want).abs()),
            "db": min(map(sqnr_db, want_grads[2:], grads[2:])),  # but the embedding's
            "equal": equal_on_ranks(grads),
            "fused": numel < 96 * V,
            "logits": type(logits).__name__,
        }
    return results


def _fsdp(model, config, loss_of, alone=False, connected=True, level="O1", **options):
    convert_to_float8(model, config)
    options = {"mesh": init_device_mesh("cpu", (RANKS,)), "mp_policy": BF16, **options}
    fully_shard(model.inner, **options)
    if alone:
        fully_shard(model.lm_head, **options)
    fully_shard(model, **options)
    if connected:
        connect_fsdp(model, config)
    return model, loss_of, None, False


def case_fsdp():
    results = {}
    for reshards in (False, True):
        for loss_of in (_in_model, _outside):
            wrap = functools.partial(_fsdp, reshard_after_forward=reshards)
            results[f"{reshards} {loss_of.__name__}"] = _compared(wrap, loss_of)
    results["tied"] = _compared(wrap, _outside, tied=True)
    for loss_of in (_in_model, _outside):
        wrap = functools.partial(_fsdp, reshard_after_forward=True, offload_policy=OFFLOAD)
        results[f"offloaded {loss_of.__name__}"] = _compared(wrap, loss_of)
    results["offloaded, tied"] = _compared(wrap, _outside, tied=True)
    results["alone"] = _compared(functools.partial(_fsdp, alone=True), _outside)
    wrap = functools.partial(_fsdp, connected=False)
    results["not connected"] = _compared(wrap, _outside)
    return results


def case_fsdp_levels():
    """Split shards, on the CPU or not: the head's weight is gathered in BF16."""
    results = {}
    for level, options in (("O2", {}), ("O3", {}), ("O2", {"offload_policy": OFFLOAD})):
        numels, losses = [], []
        for loss_head in ("off", "bf16"):
            torch.manual_seed(0)
            config = FP8Config("tensorwise", opt_level=level, loss_head=loss_head)
            model = _fsdp(WithLoss(), config, _outside, connected=False, **options)[0]
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            split_sharded(model, [optimizer], config)
            convert_optimizer(optimizer, config, model=model)
            connect_fsdp(model, config)
            loss, _, numel = _steps(model, _outside, optimizer, autocast=False)
            losses.append(loss)
            numels.append(numel)
        difference = float(((losses[1] - losses[0]) / losses[0]).abs().max())
        results[f"{level} {list(options)}"] = difference, numels[1] < 96 * V
    return results


def case_fsdp_fp8():
    """Heads in FP8, stored and sharded in FP8 or not, beside one whose logits are in memory."""
    results = {}
    for stored in ("fp8", "keep", "trained", "fp8, offloaded", "trained, offloaded"):
        stored, _, offload = stored.partition(", ")
        policy = {"offload_policy": OFFLOAD} if offload else {}
        for loss_of in (_in_model, _outside):
            losses, numels = [], []
            for loss_head in ("off", "fp8" if stored == "trained" else "auto"):
                torch.manual_seed(0)
                options = {"skip": () if loss_head == "off" else ("lm_head",)}
                options |= {} if stored == "trained" else {"frozen_weights": stored}
                config = FP8Config("tensorwise", opt_level="O2", loss_head=loss_head, **options)
                model = WithLoss()
                model.lm_head.weight.requires_grad_(stored == "trained")
                wrapped = _fsdp(model, config, loss_of, reshard_after_forward=True, **policy)
                loss, grads, numel = _steps(*wrapped)
                losses.append(loss)
                numels.append(numel)
            difference = float(((losses[1] - losses[0]) / losses[0]).abs().max())
            has_gradient = "lm_head.weight" in grads
            name = f"{stored} {offload} {loss_of.__name__}"
            results[name] = difference, numels[1] < 96 * V, has_gradient
    return results


def case_reads_after_backward():
    """Losses and reads of a few steps with logits in memory, and uncomputed, by when they are read.

    A weight that stays gathered is not gathered again after a step.
    """
    results = {}
    for when in ("before the step", "after it"):
        for loss_head in ("off", "bf16"):
            torch.manual_seed(0)
            config = FP8Config("tensorwise", opt_level="O1", loss_head=loss_head)
            model = _fsdp(WithLoss(), config, _outside, reshard_after_forward=True)[0]
            optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
            values = []
            for _ in range(3):
                tokens, labels = batch(RANK)
                logits = model(tokens)["logits"]
                loss = _loss(logits, labels)
                loss.backward()
                values.append(float(loss))
                if when == "before the step":
                    values.append(float(logits.float().abs().sum()))
                optimizer.step()
                optimizer.zero_grad()
                if when == "after it":
                    try:
                        values.append(float(logits.float().abs().sum()))
                    except RuntimeError as error:
                        values.append(str(error))
            results[f"{when}, {loss_head}"] = values
    return results


def _double(model, name):
    model.get_parameter(name).mul_(2)


def _double_the_shard(model, name):
    model.get_parameter(name).to_local().mul_(2)


def _load_state_dict(model, name):
    model.load_state_dict({name: model.state_dict()[name] * 2}, strict=False)


def _write_whole(model, name):
    parameter = model.get_parameter(name)
    whole = 2 * parameter.full_tensor()
    parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


WRITERS = (_double, _double_the_shard, _load_state_dict, _write_whole)


def _sharded(kind, offloaded=False):
    """A model whose output layer is in BF16, at O2, in FP8, or frozen and stored in FP8."""
    torch.manual_seed(0)
    options = {"opt_level": "O2" if kind in ("O2", "stored") else "O1"}
    options["loss_head"] = {"fp8": "fp8", "stored": "auto"}.get(kind, "bf16")
    options |= {"frozen_weights": "fp8"} if kind == "stored" else {}
    policy = {"offload_policy": OFFLOAD} if offloaded else {}
    config, model = FP8Config("tensorwise", **options), WithLoss()
    model.lm_head.weight.requires_grad_(kind != "stored")
    policy["reshard_after_forward"] = True
    model = _fsdp(model, config, _outside, connected=False, **policy)[0]
    if kind == "O2":
        split_sharded(model, [torch.optim.AdamW(model.parameters())], config)
    connect_fsdp(model, config)
    return model


def case_written_shards():
    """What a layer computes after a write to its shards, divided by what it computed before.

    Beside it, what a read of logits gets whose forward was before the write.
    """
    results, outputs = {}, {}
    tokens, _ = batch(RANK)
    for kind in ("bf16", "O2", "fp8", "stored", "bf16, offloaded", "stored, offloaded"):
        model = _sharded(kind.partition(",")[0], "offloaded" in kind)
        model.lm_head.loss_head.fused = 1  # logits stay uncomputed
        model.inner.register_forward_hook(lambda *args: outputs.update(inner=args[2].detach()))
        for write in WRITERS:
            for name in ("lm_head.weight", "inner.weight"):
                before = model(tokens)["logits"].detach() + 0.0
                inner, unread = outputs["inner"], model(tokens)["logits"]
                with torch.no_grad():
                    write(model, name)
                try:
                    read = float((unread - before).abs().max())
                except RuntimeError as error:
                    read = str(error)
                after = model(tokens)["logits"].detach() + 0.0
                if name == "inner.weight":  # whose bias is not doubled
                    bias = model.inner.bias.full_tensor().to(inner.dtype)
                    after, before = outputs["inner"] - bias, inner - bias
                error = float((after - 2 * before).abs().max() / before.abs().max())
                results[f"{kind}, {write.__name__}, {name}"] = error, read
    return results


def case_read_after_reshard():
    """Logits that are read when FSDP2 has freed the weight; the gather is counted."""
    torch.manual_seed(0)
    config = FP8Config("tensorwise")
    model = _fsdp(WithLoss(), config, _outside, reshard_after_forward=True)[0]
    logits = model(batch(RANK)[0])["logits"]
    freed = not logits.recorded.call.weight.untyped_storage().nbytes()
    return freed, float(logits.float().abs().sum())
