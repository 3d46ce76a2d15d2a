"""DistributedDataParallel around a converted model, on two ranks; run by run_cases.py."""

import contextlib
import copy
import warnings

import torch
import torch.distributed as dist
from run_cases import RANK, equal_on_ranks, gathered, worst_sum
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.comm_counter import count_communication
from tests.internals import (
    Float8Grad,
    GradientBucket,
    GradientSlot,
    averaging,
    fp8_grad_reducer,
    gradients_report,
    residual_of,
    slot_of,
    stored_grad,
)
from tests.steps import adamw
from torch_fp8 import (
    FP8Config,
    convert_optimizer,
    convert_to_float8,
    memory_report,
    merged_state_dict,
    restore_weights,
    revert,
)
from torch_fp8.distributed import connect_ddp, ddp_options


class Branches(nn.Module):
    """Two branches without biases, of which a forward takes some."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Linear(96, 96, bias=False) for _ in range(2))
        self.never = nn.Linear(96, 96, bias=False)
        self.norm = nn.LayerNorm(96)

    def forward(self, x, left, right):
        y = self.norm(x)
        return y + (self.left(y) if left else 0) + (self.right(y) if right else 0)


def exchanges_of(model):
    slots = map(slot_of, model.parameters())
    return {slot.exchange for slot in slots if slot is not None and slot.exchange is not None}


def model_of(rank, width=96):
    torch.manual_seed(rank)
    return nn.Sequential(
        nn.Linear(96, width), nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 70)
    )


def wrapped(
    level="O3", model=None, options=None, wrap=True, communication="fp8", make=torch.optim.AdamW
):
    model = model or model_of(RANK)
    config = FP8Config(opt_level=level, communication=communication)
    convert_to_float8(model, config)
    optimizer = make(model.parameters(), lr=1e-3)
    report = convert_optimizer(optimizer, config, model=model)
    options = ddp_options(model, [optimizer], options)
    if not wrap:
        return model, optimizer, report, options
    ddp = DistributedDataParallel(model, **options)
    connect_ddp(ddp, [optimizer])
    return ddp, optimizer, gradients_report(optimizer, report)


def batch(step, rank=RANK):
    return torch.randn(16, 96, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(ddp, step, *extra, rank=RANK):
    with torch.autocast("cpu", torch.bfloat16):
        loss = ddp(batch(step, rank), *extra).float().square().mean()
    loss.backward()
    return loss.item()


def train(ddp, optimizer, steps=4, micro_batches=1):
    for step in range(steps):
        for i in range(micro_batches):
            last = i == micro_batches - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = backward(ddp, micro_batches * step + i)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def storage_bytes(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def local_gradients(ddp):
    """Sums, in float32, of what autograd gives each parameter on this rank."""
    sums = {}
    for name, parameter in ddp.module.named_parameters():
        sums[name] = torch.zeros(parameter.shape)
        parameter.register_hook(lambda g, name=name: sums[name].add_(g.float()).sum() * 0 + g)
    return sums


def error_of_average(ddp, sums):
    """The largest relative error of a gradient against the exact average over ranks."""
    errors = []
    for name, parameter in ddp.module.named_parameters():
        exact = torch.stack(gathered(sums[name])).mean(0)
        errors.append(float((parameter.grad.float() - exact).norm() / exact.norm()))
    return max(errors)


def case_start():
    ddp, optimizer, report = wrapped()
    merged = merged_state_dict(ddp, optimizer)
    expected = model_of(0).state_dict()
    close = [(merged[name] - value).abs().max() for name, value in expected.items()]
    return {
        "equal": equal_on_ranks(merged.values()),
        "distance to rank 0's": float(max(close)),
        "report": str(report),
        "ignored": sorted(ddp.parameters_to_ignore),
        "left on the module": [k for k in ddp.module.__dict__ if "ignore" in k or "fp8" in k],
        "flags": sum(hasattr(p, "_ddp_ignored") for p in ddp.parameters()),
    }


def case_bytes():
    made = {}
    for level in ("O1", "O2", "O3"):
        ddp, optimizer, _ = wrapped(level, model_of(RANK, 768))
        train(ddp, optimizer, 1)
        backward(ddp, 9)
        optimizer.step()
        grads = [stored_grad(p) for p in ddp.parameters()]
        plain = [g for g in grads if type(g) is torch.Tensor]
        numel = sum(p.numel() for p in ddp.parameters())
        buckets = sum(map(int, ddp._get_ddp_logging_data()["bucket_sizes"].split(",")))
        made[level] = {
            "8-bit": sum(type(g) is Float8Grad for g in grads),
            "buckets": buckets / numel,
            "plain gradients": storage_bytes(plain) / numel,
            "total": memory_report(ddp.module, optimizer).bytes_per_param,
        }
    return made


def case_own_states():
    made = {}
    for level in ("O2", "O3"):
        ddp, optimizer, report = wrapped(level, make=torch.optim.RMSprop)
        train(ddp, optimizer, 3)
        backward(ddp, 9)
        grads = [stored_grad(p) for p in ddp.parameters() if p.ndim == 2]
        optimizer.step()
        made[level] = [
            report.num_split,
            equal_on_ranks(merged_state_dict(ddp, optimizer).values()),
            sorted({f"{type(g).__name__} {g.dtype}" for g in grads}),
        ]
    return made


def case_averages():
    made = {}
    for communication in ("fp8", "off"):
        for micro_batches in (1, 8):
            for every in (False, True):
                ddp, _optimizer, _ = wrapped(communication=communication)
                sums = local_gradients(ddp)
                for i in range(micro_batches):
                    last = i == micro_batches - 1
                    with contextlib.nullcontext() if last or every else ddp.no_sync():
                        backward(ddp, i)
                grads = [p.grad for p in ddp.parameters()]
                made[f"{communication} {micro_batches} {every}"] = {
                    "error": error_of_average(ddp, sums),
                    "equal": equal_on_ranks(grads),
                    "8-bit": sum(type(g) is Float8Grad for g in grads),
                }
    return made


def case_many_micro_batches():
    made = {}
    for communication, counts in (("fp8", (64, 512, 2048)), ("off", (64,))):
        model = nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 70))
        ddp, _optimizer, _ = wrapped("O2", model, communication=communication)
        sums = local_gradients(ddp)
        with ddp.no_sync(), torch.autocast("cpu", torch.bfloat16):
            loss = ddp(batch(0, RANK)).float().square().mean()
        for i in range(1, counts[-1]):
            loss.backward(retain_graph=True)
            if i in counts:
                pairs = [(p.grad, sums[name]) for name, p in ddp.module.named_parameters()]
                made[f"{communication} {i}"] = worst_sum(pairs)
        backward(ddp, 0)
        pairs = [
            (p.grad, torch.stack(gathered(sums[name])).double().mean(0))
            for name, p in ddp.module.named_parameters()
        ]
        made[f"{communication} {counts[-1]}"] = worst_sum(pairs)
    return made


def case_one_rank():
    ddp, optimizer, _ = wrapped()
    model = model_of(0)
    single, _ = adamw(model, FP8Config(opt_level="O3"), lr=1e-3)
    start = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    for step in range(20):
        backward(ddp, step)
        for rank in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(step, rank)).float().square().mean() / 2
            loss.backward()
        for o in (optimizer, single):
            o.step()
            o.zero_grad()
    one, two = merged_state_dict(model, single), merged_state_dict(ddp, optimizer)
    distances = [
        float((one[n] - two[n]).norm() / (one[n] - value).norm()) for n, value in start.items()
    ]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        held_out = torch.cat([batch(step, rank) for step in range(100, 140) for rank in range(2)])
        losses = [m(held_out).float().square().mean().item() for m in (model, ddp.module)]
    return {"distances": distances, "losses": losses}


def case_plain_where_ddp_needs_it():
    made = {}
    for option in ("find_unused_parameters", "static_graph"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp, optimizer, report = wrapped(options={option: True})
        train(ddp, optimizer)
        backward(ddp, 9)
        made[option] = {
            "warned": any("stay in BF16" in str(w.message) for w in caught),
            "report": str(report),
            "8-bit": sum(type(p.grad) is Float8Grad for p in ddp.parameters()),
            "ignored": len(ddp.parameters_to_ignore),
            "equal": equal_on_ranks(merged_state_dict(ddp, optimizer).values()),
        }
    return made


def case_options():
    kept = wrapped("O3", options={"gradient_as_bucket_view": False, "bucket_cap_mb": 1}, wrap=False)
    return {"kept": kept[3], "O1": wrapped("O1", wrap=False)[3]}


def case_nothing_left():
    layers = [nn.Linear(96, 128, bias=False), nn.Linear(128, 96, bias=False)]
    layers.append(nn.Linear(96, 64, bias=False))
    ddp, optimizer, report = wrapped(model=nn.Sequential(*layers))
    train(ddp, optimizer)
    backward(ddp, 9)
    single, other, _ = wrapped(model=nn.Linear(96, 96))
    train(single, other)
    backward(single, 9)
    return {
        "8-bit": [type(p.grad) is Float8Grad for p in ddp.parameters()],
        "report": str(report),
        "layer": [type(p.grad) is Float8Grad for p in single.parameters()],
        "equal": equal_on_ranks([*ddp.parameters(), *single.parameters()]),
    }


def case_unused():
    ddp, optimizer, _ = wrapped(model=Branches())
    sums = local_gradients(ddp)
    backward(ddp, 0, RANK == 0, True)
    del sums["never.weight"]
    none = ddp.module.never.weight.grad is None
    ddp.module.never.weight.grad = torch.zeros_like(ddp.module.never.weight)
    sums["never.weight"] = torch.ones(1)
    exact = torch.stack(gathered(sums["left.weight"])).mean(0)
    error = float((ddp.module.left.weight.grad.float() - exact).norm() / exact.norm())
    equal = equal_on_ranks([p.grad for p in ddp.parameters()])
    ddp.zero_grad()
    for step in range(3):
        with ddp.no_sync():
            backward(ddp, step, RANK == 1, step == 0)
        backward(ddp, step, False, RANK == 0)
        optimizer.step()
        optimizer.zero_grad()
    merged = merged_state_dict(ddp, optimizer)
    never = ddp.module.never.weight in optimizer.state
    return {
        "none": none,
        "error": error,
        "equal": [equal, equal_on_ranks(merged.values())],
        "never stepped": not never,
    }


def case_overlapped():
    usual, fp8_grad_reducer._BUCKET_NUMEL = fp8_grad_reducer._BUCKET_NUMEL, 1
    made = []
    for overlaps in (False, True):
        torch.manual_seed(RANK)
        layers = [nn.Linear(96, 96) for _ in range(5)]
        ddp, optimizer, _ = wrapped(model=nn.Sequential(*layers, nn.LayerNorm(96)))
        (reducer,) = exchanges_of(ddp)
        reducer._overlaps = overlaps
        train(ddp, optimizer, 3, 2)
        made.append(merged_state_dict(ddp, optimizer))
    fp8_grad_reducer._BUCKET_NUMEL = usual
    return all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def case_rounding():
    """The same 8-bit gradients averaged 32 times: error of the averages, and of their mean.

    Each rank averages one of the gradients' two halves, which are the same.
    """
    weight, slot = nn.Parameter(torch.zeros(64, 96)), GradientSlot()
    slot.quantize = True
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(RANK))
    sent = Float8Grad.quantize(x)
    for part in (sent.qdata, sent.scale):
        part[32:] = part[:32]
    exact, errors = torch.stack(gathered(sent)).mean(0), []
    for _ in range(32):
        weight.grad = copy.deepcopy(sent)
        bucket = GradientBucket({weight: slot}, dist.group.WORLD)
        bucket.gather()
        bucket.finish()
        errors.append(weight.grad.float() - exact)
        sent.rounding.next_exchanged()
    errors = torch.stack(errors)
    mean = errors.mean(0).norm() / exact.norm()
    rounded = errors[:, :32] != 0
    alike = (errors[:, :32] == errors[:, 32:])[rounded].float().mean()
    return [float(errors[0].norm() / exact.norm()), float(mean), float(alike)]


WRITES = {
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_(p, 1e-4),
    "add_": lambda p: p.grad.add_(p.detach(), alpha=1e-2),
    "foreach add": lambda p: torch._foreach_add_([p.grad], [p.detach()], alpha=1e-2),
    "centred": lambda p: p.grad.sub_(p.grad.mean(1, keepdim=True)),
    "masked_fill_": lambda p: p.grad.masked_fill_(p.detach() > 0, 1e-3),
    "view": lambda p: p.grad.view(-1)[7:99].mul_(3.3),
    "data": lambda p: setattr(p.grad, "data", p.grad * 1.1 + 1e-3),
}


def case_written_after_it_is_averaged():
    ddp, optimizer, _ = wrapped(model=model_of(0, width=128))
    weights = [p for p in ddp.parameters() if p.numel() >= 4096]
    results = {}
    for micro_batches in (1, 2):
        for name, write in WRITES.items():
            optimizer.zero_grad()
            for i in range(micro_batches):
                backward(ddp, i)
            for weight in weights:
                write(weight)
            eight = all(isinstance(w.grad, Float8Grad) for w in weights)
            results[f"{name} {micro_batches}"] = eight and equal_on_ranks(w.grad for w in weights)
    return results


@contextlib.contextmanager
def collectives():
    """Collect the collectives that this rank begins: name, number of elements, process group."""
    begun, names = [], ("all_reduce", "broadcast", "all_to_all_single")
    places = [*((dist, name) for name in names), (averaging, "_all_gather")]
    originals = [getattr(module, name) for module, name in places]

    def recorder(name, original):
        def recorded(tensor, *args, group=None, **kwargs):
            begun.append([name, tensor.numel(), (group or dist.group.WORLD).group_name])
            return original(tensor, *args, group=group, **kwargs)

        return recorded

    for (module, name), original in zip(places, originals, strict=True):
        setattr(module, name, recorder(name, original))
    try:
        yield begun
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def case_unused_beside_many_buckets():
    """Ranks whose 8-bit gradients become ready in another order, beside several buckets of DDP."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Branches() for _ in range(3))

        def forward(self, x):
            for i, part in enumerate(self.parts):
                x = part(x, i % 2 == RANK, i % 2 != RANK)
            return x

    made = {}
    for way in ("fp8", "off", "another hook"):
        usual, fp8_grad_reducer._BUCKET_NUMEL = fp8_grad_reducer._BUCKET_NUMEL, 1
        communication = "off" if way == "off" else "fp8"
        ddp, optimizer, _ = wrapped(
            model=Chain(), options={"bucket_cap_mb": 1e-4}, communication=communication
        )
        if way == "another hook":
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        with collectives() as begun:
            for step in range(4):
                backward(ddp, step)
                optimizer.step()
                optimizer.zero_grad()
        fp8_grad_reducer._BUCKET_NUMEL = usual
        buckets = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        equal = equal_on_ranks(merged_state_dict(ddp, optimizer).values())
        made[way] = [len(buckets.split(",")), equal, begun]
    return made


def case_scaled_before_it_is_averaged():
    ddp, _optimizer, _ = wrapped(model=Branches())
    with ddp.no_sync():
        backward(ddp, 0, True, True)
    left = ddp.module.left.weight
    exact = torch.stack(gathered(left.grad)).mean(0) * 0.25
    left.grad.mul_(0.25)
    backward(ddp, 1, False, True)
    return float((left.grad.float() - exact).norm() / exact.norm())


def case_not_finite():
    ddp, _optimizer, _ = wrapped()
    handle = ddp.module[2].weight.register_hook(lambda g: g * float("inf") if RANK == 1 else g)
    backward(ddp, 0)
    handle.remove()
    bad = [not bool(p.grad.isfinite().all()) for p in ddp.parameters()]
    norm = torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()])
    return {"bad": bad, "norm is finite": bool(norm.isfinite())}


def case_join():
    """Uneven inputs: rank 1 has two steps more, the first of two micro-batches."""
    made = {}
    for level, communication in (("O2", "fp8"), ("O3", "fp8"), ("O3", "off")):
        ddp, optimizer, _ = wrapped(level, communication=communication)
        exact = local_gradients(ddp)
        with ddp.join() if communication == "fp8" else Join([ddp]):
            for step in range(3 + 2 * RANK):
                optimizer.zero_grad()
                for total in exact.values():
                    total.zero_()
                if step == 3:
                    with ddp.no_sync():
                        backward(ddp, 50)
                backward(ddp, step)
                before = [p.grad.clone() for p in ddp.parameters()]
                optimizer.step()
            mine = [t.clone() for t in _weights_and_residuals(ddp)]
            _evaluated(ddp)  # which caches the weights that rank 0 is about to replace
        after = [p.grad for p in ddp.parameters()]
        # Rank 0 sent zeros in the last step, and its own gradients are those of its last.
        errors = [
            float((p.grad.float() - exact[name] / 2).norm() / exact[name].norm() * 2)
            for name, p in ddp.module.named_parameters()
        ]
        state = _weights_and_residuals(ddp)
        made[f"{level} {communication}"] = {
            "errors": errors if RANK == 1 else [],
            "untouched": all(torch.equal(g, h) for g, h in zip(before, after, strict=True)),
            "equal": equal_on_ranks([*state, _evaluated(ddp)]),
            "mine": all(torch.equal(s, t) for s, t in zip(state, mine, strict=True)),
        }
        with copy.deepcopy(ddp).join():
            pass
        optimizer.zero_grad()
        train(ddp, optimizer, 1)  # even again
        made[f"{level} {communication}"]["goes on"] = all(
            torch.isfinite(p).all().item() for p in ddp.parameters()
        )
    return made


@torch.no_grad()
def _evaluated(ddp):
    with torch.autocast("cpu", torch.bfloat16):
        return ddp.module(batch(0, 0))


def _weights_and_residuals(ddp):
    residuals = [residual_of(p) for p in ddp.parameters()]
    return [*ddp.parameters(), *(r for r in residuals if r is not None)]


def case_order():
    class LastToFirst(nn.Sequential):
        def forward(self, x):
            for layer in reversed(self):
                x = layer(x)
            return x

    made = {}
    for communication, name in (("fp8", "all_to_all_single"), ("off", "all_reduce")):
        layers = nn.Linear(80, 64), nn.Linear(96, 80), nn.Linear(96, 96)
        usual, fp8_grad_reducer._BUCKET_NUMEL = fp8_grad_reducer._BUCKET_NUMEL, 1
        ddp, optimizer, _ = wrapped(model=LastToFirst(*layers), communication=communication)
        made[communication] = events = []
        original = getattr(dist, name)

        def recorded(tensor, *args, events=events, original=original, **kwargs):
            events.append(["sent", tensor.numel()])
            return original(tensor, *args, **kwargs)

        for parameter in ddp.parameters():
            if parameter.ndim == 2:
                parameter.register_hook(lambda g, e=events: e.append(["ready", g.numel()]))
        setattr(dist, name, recorded)
        for step in range(2):
            backward(ddp, step)
            optimizer.zero_grad()
        setattr(dist, name, original)
        fp8_grad_reducer._BUCKET_NUMEL = usual
    return made


def case_messages():
    made = []
    for numel in (1, 8 << 20):
        usual, fp8_grad_reducer._BUCKET_NUMEL = fp8_grad_reducer._BUCKET_NUMEL, numel
        torch.manual_seed(RANK)
        layers = nn.Linear(96, 65), nn.Linear(65, 67), nn.Linear(67, 96), nn.Linear(96, 96)
        ddp, _optimizer, _ = wrapped(model=nn.Sequential(*layers))
        sums = local_gradients(ddp)
        with count_communication() as count:
            backward(ddp, 0)
        fp8_grad_reducer._BUCKET_NUMEL = usual
        equal = equal_on_ranks(p.grad for p in ddp.parameters())
        made.append([error_of_average(ddp, sums), equal, sum(row.calls for row in count.rows)])
    return made


def case_several_modules():
    modules = [model_of(RANK), model_of(RANK + 2), model_of(RANK + 4)]
    config = FP8Config(opt_level="O3")
    for module in modules:
        convert_to_float8(module, config)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    convert_optimizer(optimizer, config, model=nn.ModuleList(modules))
    wrapped = []
    for module, options in zip(modules, ({}, {}, {"static_graph": True}), strict=True):
        options = ddp_options(module, [optimizer], options)
        wrapped.append(DistributedDataParallel(module, **options))
        connect_ddp(wrapped[-1], [optimizer])
    for step in range(3):
        for ddp in wrapped:
            backward(ddp, step)
        eight = [sum(type(p.grad) is Float8Grad for p in ddp.parameters()) for ddp in wrapped]
        optimizer.step()
        optimizer.zero_grad()
    return [eight, equal_on_ranks(merged_state_dict(nn.ModuleList(modules), optimizer).values())]


def case_reentrant():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model_of(0)

        def forward(self, x):
            x.requires_grad_()
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    runs = []
    for model in (Model(), model_of(0)):
        ddp, optimizer, _ = wrapped(model=model)
        train(ddp, optimizer, 3)
        runs.append(merged_state_dict(ddp, optimizer))
    return {
        "equal": equal_on_ranks(runs[0].values()),
        "as without": all(
            torch.equal(p, q) for p, q in zip(runs[0].values(), runs[1].values(), strict=True)
        ),
    }


def case_after_an_error():
    ddp, optimizer, _ = wrapped()
    train(ddp, optimizer, 2)

    def fail(_):
        raise ArithmeticError

    # The first gradient of all: DDP itself has not begun to average then, and can go on.
    handle = ddp.module[3].bias.register_hook(fail)
    with contextlib.suppress(ArithmeticError):
        backward(ddp, 3)
    handle.remove()
    optimizer.zero_grad()
    train(ddp, optimizer, 2)
    return equal_on_ranks(merged_state_dict(ddp, optimizer).values())


def case_different_weights():
    model = model_of(RANK)
    if RANK == 1:
        model[2] = nn.Linear(96, 96, bias=False)
        model[2].requires_grad_(False)
    try:
        wrapped(model=model, wrap=False)
    except ValueError as error:
        return str(error)


def case_wrapped_again():
    ddp, optimizer, _ = wrapped()
    train(ddp, optimizer, 2)
    model = ddp.module
    del ddp
    convert_optimizer(optimizer, FP8Config(), model=model)
    ddp = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
    connect_ddp(ddp, [optimizer])
    train(ddp, optimizer, 2)
    equal = [len(ddp.parameters_to_ignore), equal_on_ranks(ddp.parameters())]
    del ddp
    restore_weights(optimizer)
    revert(model)
    ddp = DistributedDataParallel(model)
    train(ddp, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    return [*equal, len(ddp.parameters_to_ignore), equal_on_ranks(ddp.parameters())]


def case_compiled():
    ddp, optimizer, _ = wrapped()
    compiled = torch.compile(ddp, backend="aot_eager")
    connect_ddp(compiled, [optimizer])  # once more
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(batch(step)).float().square().mean()
        loss.backward()
        eight = sum(type(p.grad) is Float8Grad for p in ddp.parameters())
        optimizer.step()
        optimizer.zero_grad()
    equal = equal_on_ranks(merged_state_dict(ddp, optimizer).values())
    return [eight, equal, len(exchanges_of(ddp)), len(ddp._forward_hooks)]


def case_copied():
    ddp, optimizer, _ = wrapped()
    train(ddp, optimizer, 1)
    twin = copy.deepcopy(ddp.module)
    return [len(twin.state_dict()), bool(exchanges_of(twin))]


def case_one_process():
    group = [dist.new_group([rank]) for rank in range(2)][RANK]
    ddp, optimizer, _ = wrapped(options={"process_group": group})
    train(ddp, optimizer, 2, 3)
    model = model_of(RANK)
    single, _ = adamw(model, FP8Config(opt_level="O3"), lr=1e-3)
    for step in range(2):
        for i in range(3):
            backward(model, 3 * step + i)
        single.step()
        single.zero_grad()
    pairs = zip(model.parameters(), ddp.module.parameters(), strict=True)
    return [exchanges_of(ddp) == set(), all(torch.equal(p, q) for p, q in pairs)]
