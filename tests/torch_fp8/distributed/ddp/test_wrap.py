import contextlib
import copy
import re

import pytest
import torch
import torch.distributed as dist
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
from tests.torch_fp8.distributed.ranks import RANK, equal_on_ranks, gathered, on_ranks, worst_sum
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

pytestmark = pytest.mark.long


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


@contextlib.contextmanager
def buckets_of(numel):
    """Send gradients as soon as they have this many elements together."""
    usual, fp8_grad_reducer._BUCKET_NUMEL = fp8_grad_reducer._BUCKET_NUMEL, numel
    try:
        yield
    finally:
        fp8_grad_reducer._BUCKET_NUMEL = usual


@on_ranks(2)
def test_all_ranks_start_with_rank_0s_weights_and_ddp_leaves_the_others_alone():
    ddp, optimizer, report = wrapped()
    merged = merged_state_dict(ddp, optimizer)
    expected = model_of(0).state_dict()
    close = [(merged[name] - value).abs().max() for name, value in expected.items()]
    assert equal_on_ranks(merged.values())
    assert max(close) < 2e-6  # 16 significand bits of weights below 0.125
    assert "3 gradients in 8 bits" in str(report)
    assert sorted(ddp.parameters_to_ignore) == ["0.weight", "2.weight", "3.weight"]
    assert not [k for k in ddp.module.__dict__ if "ignore" in k or "fp8" in k]
    assert not any(hasattr(p, "_ddp_ignored") for p in ddp.parameters())


@on_ranks(2)
def test_bytes_are_those_of_one_process():
    for level in ("O1", "O2", "O3"):
        ddp, optimizer, _ = wrapped(level, model_of(RANK, 768))
        train(ddp, optimizer, 1)
        backward(ddp, 9)
        optimizer.step()
        grads = [stored_grad(p) for p in ddp.parameters()]
        plain = [g for g in grads if type(g) is torch.Tensor]
        numel = sum(p.numel() for p in ddp.parameters())
        buckets = sum(map(int, ddp._get_ddp_logging_data()["bucket_sizes"].split(",")))
        of_plain, of_buckets = storage_bytes(plain) / numel, buckets / numel
        total = memory_report(ddp.module, optimizer).bytes_per_param
        if level == "O1":
            assert of_buckets == of_plain == 4
        elif level == "O2":
            assert of_plain == pytest.approx(2, rel=0.01)
            assert of_buckets < 0.02  # of what is not split
            assert total <= 7.2
        else:
            assert sum(type(g) is Float8Grad for g in grads) == 3
            assert of_buckets == of_plain < 0.02
            assert total <= 6.2


@on_ranks(2)
def test_an_optimizer_that_keeps_its_states_has_split_weights_and_narrow_gradients():
    for level, kind in (("O2", "Tensor torch.bfloat16"), ("O3", "Float8Grad torch.float32")):
        ddp, optimizer, report = wrapped(level, make=torch.optim.RMSprop)
        train(ddp, optimizer, 3)
        backward(ddp, 9)
        grads = [stored_grad(p) for p in ddp.parameters() if p.ndim == 2]
        optimizer.step()
        assert report.num_split == 3
        assert equal_on_ranks(merged_state_dict(ddp, optimizer).values())
        assert {f"{type(g).__name__} {g.dtype}" for g in grads} == {kind}


@on_ranks(2)
def test_averages_are_exact_up_to_their_rounding():
    """One rounding is 0.0155, two are 0.022."""
    most = {("fp8", 1): 0.03, ("fp8", 8): 0.06, ("off", 1): 0.02, ("off", 8): 0.05}
    for (communication, micro_batches), error in most.items():
        for every in (False, True):
            ddp, _optimizer, _ = wrapped(communication=communication)
            sums = local_gradients(ddp)
            for i in range(micro_batches):
                last = i == micro_batches - 1
                with contextlib.nullcontext() if last or every else ddp.no_sync():
                    backward(ddp, i)
            grads = [p.grad for p in ddp.parameters()]
            assert error_of_average(ddp, sums) < error
            assert equal_on_ranks(grads)
            assert sum(type(g) is Float8Grad for g in grads) == 3


@on_ranks(2)
def test_a_sum_of_many_micro_batches_does_not_fall_short():
    found = []
    for communication, counts in (("fp8", (64, 512)), ("off", (64,))):
        model = nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 70))
        ddp, _optimizer, _ = wrapped("O2", model, communication=communication)
        sums = local_gradients(ddp)
        with ddp.no_sync(), torch.autocast("cpu", torch.bfloat16):
            loss = ddp(batch(0, RANK)).float().square().mean()
        for i in range(1, counts[-1]):
            loss.backward(retain_graph=True)
            if i in counts:
                pairs = [(p.grad, sums[name]) for name, p in ddp.module.named_parameters()]
                found.append(worst_sum(pairs))
        backward(ddp, 0)
        pairs = [
            (p.grad, torch.stack(gathered(sums[name])).double().mean(0))
            for name, p in ddp.module.named_parameters()
        ]
        found.append(worst_sum(pairs))
    assert len(found) == 3
    for *projections, decibels in found:
        assert projections == pytest.approx([1, 1], abs=0.003)
        assert decibels >= 30


@on_ranks(2)
def test_where_ddp_needs_plain_gradients_it_runs_as_o2_and_says_so():
    for option in ("find_unused_parameters", "static_graph"):
        with pytest.warns(UserWarning, match="no gradient has 8 bits"):
            ddp, optimizer, report = wrapped(options={option: True})
        train(ddp, optimizer)
        backward(ddp, 9)
        reason = f"no gradients in 8 bits: DistributedDataParallel({option}=True)"
        assert reason in str(report)
        assert not any(type(p.grad) is Float8Grad for p in ddp.parameters())
        assert not ddp.parameters_to_ignore
        assert equal_on_ranks(merged_state_dict(ddp, optimizer).values())


@on_ranks(2)
def test_a_users_options_stay():
    options = {"gradient_as_bucket_view": False, "bucket_cap_mb": 1}
    assert wrapped("O3", options=options, wrap=False)[3] == options
    assert wrapped("O1", wrap=False)[3] == {"gradient_as_bucket_view": True}


@on_ranks(2)
def test_ddp_is_left_one_weight():
    layers = [nn.Linear(96, 128, bias=False), nn.Linear(128, 96, bias=False)]
    layers.append(nn.Linear(96, 64, bias=False))
    ddp, optimizer, report = wrapped(model=nn.Sequential(*layers))
    train(ddp, optimizer)
    backward(ddp, 9)
    single, other, _ = wrapped(model=nn.Linear(96, 96))
    train(single, other)
    backward(single, 9)
    assert [type(p.grad) is Float8Grad for p in ddp.parameters()] == [True, True, False]
    assert "2 gradients in 8 bits" in str(report)
    assert [type(p.grad) is Float8Grad for p in single.parameters()] == [True, False]
    assert equal_on_ranks([*ddp.parameters(), *single.parameters()])


@on_ranks(2)
def test_a_weight_without_a_gradient_on_some_ranks():
    ddp, optimizer, _ = wrapped(model=Branches())
    sums = local_gradients(ddp)
    backward(ddp, 0, RANK == 0, True)
    assert ddp.module.never.weight.grad is None
    ddp.module.never.weight.grad = torch.zeros_like(ddp.module.never.weight)
    exact = torch.stack(gathered(sums["left.weight"])).mean(0)
    assert (ddp.module.left.weight.grad.float() - exact).norm() < 0.02 * exact.norm()
    assert equal_on_ranks([p.grad for p in ddp.parameters()])
    ddp.zero_grad()
    for step in range(3):
        with ddp.no_sync():
            backward(ddp, step, RANK == 1, step == 0)
        backward(ddp, step, False, RANK == 0)
        optimizer.step()
        optimizer.zero_grad()
    assert equal_on_ranks(merged_state_dict(ddp, optimizer).values())
    assert ddp.module.never.weight not in optimizer.state


@on_ranks(2)
def test_the_schedule_of_cuda_gives_the_same():
    made = []
    for overlaps in (False, True):
        torch.manual_seed(RANK)
        layers = [nn.Linear(96, 96) for _ in range(5)]
        ddp, optimizer, _ = wrapped(model=nn.Sequential(*layers, nn.LayerNorm(96)))
        (reducer,) = exchanges_of(ddp)
        reducer._overlaps = overlaps
        with buckets_of(1):
            train(ddp, optimizer, 3, 2)
        made.append(merged_state_dict(ddp, optimizer))
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


@on_ranks(2)
def test_averages_are_rounded_stochastically():
    """To nearest, all 32 would be the same, and their mean no better than one of them.

    Each rank averages one of the gradients' two halves, which are the same: with the same bits on
    all ranks, equal halves would stay equal.
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
    assert 0.01 < errors[0].norm() / exact.norm() < 0.03
    assert errors.mean(0).norm() < 0.3 * errors[0].norm()  # 0.18, were the averages independent
    rounded = errors[:, :32] != 0
    assert 0.3 < (errors[:, :32] == errors[:, 32:])[rounded].float().mean() < 0.8


WRITES = {
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_(p, 1e-4),
    "add_": lambda p: p.grad.add_(p.detach(), alpha=1e-2),
    "foreach add": lambda p: torch._foreach_add_([p.grad], [p.detach()], alpha=1e-2),
    "centred": lambda p: p.grad.sub_(p.grad.mean(1, keepdim=True)),
    "masked_fill_": lambda p: p.grad.masked_fill_(p.detach() > 0, 1e-3),
    "view": lambda p: p.grad.view(-1)[7:99].mul_(3.3),
    "data": lambda p: setattr(p.grad, "data", p.grad * 1.1 + 1e-3),
}


@on_ranks(2)
def test_averages_that_the_loop_writes_to_stay_equal():
    ddp, optimizer, _ = wrapped(model=model_of(0, width=128))
    weights = [p for p in ddp.parameters() if p.numel() >= 4096]
    for micro_batches in (1, 2):
        for name, write in WRITES.items():
            optimizer.zero_grad()
            for i in range(micro_batches):
                backward(ddp, i)
            for weight in weights:
                write(weight)
            assert all(isinstance(w.grad, Float8Grad) for w in weights), name
            assert equal_on_ranks(w.grad for w in weights), name


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


@on_ranks(2)
def test_ranks_that_are_ready_in_different_orders_begin_collectives_in_one_order():
    """Several buckets of DDP's and ours are in one process group: in two groups a rank could wait
    for one that waits in the other.
    """

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Branches() for _ in range(3))

        def forward(self, x):
            for i, part in enumerate(self.parts):
                x = part(x, i % 2 == RANK, i % 2 != RANK)
            return x

    for way in ("fp8", "off", "another hook"):
        communication = "off" if way == "off" else "fp8"
        ddp, optimizer, _ = wrapped(
            model=Chain(), options={"bucket_cap_mb": 1e-4}, communication=communication
        )
        if way == "another hook":
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        with buckets_of(1), collectives() as begun:
            for step in range(4):
                backward(ddp, step)
                optimizer.step()
                optimizer.zero_grad()
        buckets = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        assert len(buckets.split(",")) >= 3
        assert equal_on_ranks(merged_state_dict(ddp, optimizer).values())
        dist.all_gather_object(every := [None] * 2, begun)
        assert every[0] == every[1]
        assert len({group for *_, group in begun}) == 1
        if way == "another hook":  # whose buckets are there, too
            assert sum(name == "all_reduce" for name, *_ in begun) >= 4 * 3


@on_ranks(2)
def test_a_gradient_that_was_scaled_is_averaged_as_it_reads():
    ddp, _optimizer, _ = wrapped(model=Branches())
    with ddp.no_sync():
        backward(ddp, 0, True, True)
    left = ddp.module.left.weight
    exact = torch.stack(gathered(left.grad)).mean(0) * 0.25
    left.grad.mul_(0.25)
    backward(ddp, 1, False, True)
    assert (left.grad.float() - exact).norm() < 0.03 * exact.norm()


@on_ranks(2)
def test_all_ranks_see_what_is_not_finite_on_one():
    ddp, _optimizer, _ = wrapped()
    handle = ddp.module[2].weight.register_hook(lambda g: g * float("inf") if RANK == 1 else g)
    backward(ddp, 0)
    handle.remove()
    bad = [not bool(p.grad.isfinite().all()) for p in ddp.parameters()]
    norm = torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()])
    assert bad == [False] * 4 + [True] + [False] * 3
    assert not norm.isfinite()


@on_ranks(2)
def test_a_rank_that_has_joined_takes_part_with_zeros():
    """Uneven inputs: rank 1 has two steps more, the first of two micro-batches."""
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
        # of 8-bit gradients that were accumulated and averaged
        assert RANK == 0 or max(errors) < 0.04
        assert all(torch.equal(g, h) for g, h in zip(before, after, strict=True))
        assert equal_on_ranks([*state, _evaluated(ddp)])
        of_the_last = all(torch.equal(s, t) for s, t in zip(state, mine, strict=True))
        assert of_the_last == (RANK == 1)  # the last that joined
        with copy.deepcopy(ddp).join():
            pass
        optimizer.zero_grad()
        train(ddp, optimizer, 1)  # even again
        assert all(p.isfinite().all() for p in ddp.parameters())


@torch.no_grad()
def _evaluated(ddp):
    with torch.autocast("cpu", torch.bfloat16):
        return ddp.module(batch(0, 0))


def _weights_and_residuals(ddp):
    residuals = [residual_of(p) for p in ddp.parameters()]
    return [*ddp.parameters(), *(r for r in residuals if r is not None)]


@on_ranks(2)
def test_averages_are_sent_while_backward_runs():
    """In the first backward in the module's order, then in that of the gradients."""

    class LastToFirst(nn.Sequential):
        def forward(self, x):
            for layer in reversed(self):
                x = layer(x)
            return x

    numels = [64 * 80, 80 * 96, 96 * 96]
    # Two messages: codes and scales of rows of 96 and a flag, padded.
    groups = [64 * 3, 80 * 3, 96 * 3]
    messages = [2 * (-(-(g // 2) * 33 // 16) * 16 + 16) for g in groups]
    for communication, name, sizes in (
        ("fp8", "all_to_all_single", messages),
        ("off", "all_reduce", numels),
    ):
        layers = nn.Linear(80, 64), nn.Linear(96, 80), nn.Linear(96, 96)
        ddp, optimizer, _ = wrapped(model=LastToFirst(*layers), communication=communication)
        events, original = [], getattr(dist, name)

        def recorded(tensor, *args, events=events, original=original, **kwargs):
            events.append(["sent", tensor.numel()])
            return original(tensor, *args, **kwargs)

        for parameter in ddp.parameters():
            if parameter.ndim == 2:
                parameter.register_hook(lambda g, e=events: e.append(["ready", g.numel()]))
        setattr(dist, name, recorded)
        with buckets_of(1):
            for step in range(2):
                backward(ddp, step)
                optimizer.zero_grad()
        setattr(dist, name, original)
        ready, sent = [["ready", n] for n in numels], [["sent", n] for n in sizes]
        ours = [e for e in events if e[0] == "ready" or e[1] in sizes]
        assert ours[:6] == [*ready, *sent[::-1]]
        assert ours[6:] == [event for pair in zip(ready, sent, strict=True) for event in pair]


@on_ranks(2)
def test_messages_of_several_weights():
    """The rows of some are no multiple of 32."""
    calls = []
    for numel in (1, 8 << 20):
        torch.manual_seed(RANK)
        layers = nn.Linear(96, 65), nn.Linear(65, 67), nn.Linear(67, 96), nn.Linear(96, 96)
        ddp, _optimizer, _ = wrapped(model=nn.Sequential(*layers))
        sums = local_gradients(ddp)
        with buckets_of(numel), count_communication() as count:
            backward(ddp, 0)
        assert 0.01 < error_of_average(ddp, sums) < 0.03
        assert equal_on_ranks(p.grad for p in ddp.parameters())
        calls.append(sum(row.calls for row in count.rows))
    assert calls[0] == calls[1] + 2 * 3


@on_ranks(2)
def test_an_optimizer_of_several_modules():
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
    assert eight == [3, 3, 0]
    assert equal_on_ranks(merged_state_dict(nn.ModuleList(modules), optimizer).values())


@on_ranks(2)
def test_reentrant_checkpoints():
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
    assert equal_on_ranks(runs[0].values())
    assert all(map(torch.equal, *(run.values() for run in runs)))


@on_ranks(2)
def test_after_a_backward_that_raised_the_next_is_right():
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
    assert equal_on_ranks(merged_state_dict(ddp, optimizer).values())


@on_ranks(2)
def test_ranks_that_differ_are_told_at_the_start():
    model = model_of(RANK)
    if RANK == 1:
        model[2] = nn.Linear(96, 96, bias=False)
        model[2].requires_grad_(False)
    with pytest.raises(ValueError, match="converted different weights"):
        wrapped(model=model, wrap=False)


@on_ranks(2)
def test_other_levels_later_find_nothing_of_o3():
    ddp, optimizer, _ = wrapped()
    train(ddp, optimizer, 2)
    model = ddp.module
    del ddp
    convert_optimizer(optimizer, FP8Config(), model=model)
    ddp = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
    connect_ddp(ddp, [optimizer])
    train(ddp, optimizer, 2)
    assert len(ddp.parameters_to_ignore) == 3  # split weights
    assert equal_on_ranks(ddp.parameters())
    del ddp
    restore_weights(optimizer)
    revert(model)
    ddp = DistributedDataParallel(model)
    train(ddp, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert not ddp.parameters_to_ignore
    assert equal_on_ranks(ddp.parameters())


@on_ranks(2)
def test_gradients_are_averaged_and_plain_once_the_optimizer_gave_them_back():
    for communication in ("fp8", "off"):
        ddp, optimizer, _ = wrapped(communication=communication)
        train(ddp, optimizer, 1)
        restore_weights(optimizer)
        sums = local_gradients(ddp)
        backward(ddp, 1)
        assert {type(p.grad) for p in ddp.parameters()} == {torch.Tensor}
        assert error_of_average(ddp, sums) < 0.03
        assert equal_on_ranks(p.grad for p in ddp.parameters())


@on_ranks(2)
def test_compiled_around_ddp():
    ddp, optimizer, _ = wrapped()
    compiled = torch.compile(ddp, backend="aot_eager")
    connect_ddp(compiled, [optimizer])  # once more
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(batch(step)).float().square().mean()
        loss.backward()
        assert sum(type(p.grad) is Float8Grad for p in ddp.parameters()) == 3
        optimizer.step()
        optimizer.zero_grad()
    assert equal_on_ranks(merged_state_dict(ddp, optimizer).values())
    assert len(exchanges_of(ddp)) == len(ddp._forward_hooks) == 1


@on_ranks(2)
def test_copies_have_no_reducer():
    ddp, optimizer, _ = wrapped()
    train(ddp, optimizer, 1)
    twin = copy.deepcopy(ddp.module)
    assert len(twin.state_dict()) == 8
    assert not exchanges_of(twin)


def test_without_a_process_group_options_are_made_all_the_same():
    model = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96))
    config = FP8Config(opt_level="O3")
    optimizer, _ = adamw(model, config)
    options = ddp_options(model, [optimizer, torch.optim.SGD(model.parameters())])
    assert options == {"gradient_as_bucket_view": True}
    assert model._ddp_params_and_buffers_to_ignore == ["0.weight"]
    assert ddp_options(model, [optimizer], {"find_unused_parameters": False})
    assert model._ddp_params_and_buffers_to_ignore == ["0.weight"]


def _wrapped(level, **options):
    model = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96))
    config = FP8Config(opt_level=level)
    optimizer, _ = adamw(model, config)
    ddp = DistributedDataParallel(model, **options, **ddp_options(model, [optimizer]))
    return ddp, optimizer


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_forward_before_gradients_are_averaged_is_refused(single_process_group, level):
    ddp, optimizer = _wrapped(level)
    x = torch.randn(8, 96)
    with pytest.raises(RuntimeError, match=r"call connect_ddp\(ddp, \[optimizer\]\)"):
        ddp(x)
    ddp.module(x)  # without DDP nothing is averaged
    connect_ddp(ddp, [optimizer])
    ddp(x).sum().backward()
    assert not ddp.module._forward_pre_hooks


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_options_that_need_plain_gradients_are_refused_beside_ours(single_process_group, option):
    ddp, optimizer = _wrapped("O2", **{option: True})
    call = f"ddp_options(model, [optimizer], {{'{option}': True}})"
    with pytest.raises(ValueError, match=re.escape(call)):
        connect_ddp(ddp, [optimizer])
