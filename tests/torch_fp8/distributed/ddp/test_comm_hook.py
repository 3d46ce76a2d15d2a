import contextlib
import copy
import io
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.comm_counter import count_communication
from tests.internals import Run, averaging, joined, pieces_of, runs_of, target_of
from tests.steps import adamw
from tests.torch_fp8.distributed.ranks import RANK, RANKS, equal_on_ranks, on_ranks
from torch_fp8 import FP8Config
from torch_fp8.distributed import connect_ddp, ddp_options

pytestmark = pytest.mark.long
TWO_ROUNDINGS = 0.0205  # relative error; Gaussian values give 0.0195
CONFIG = FP8Config(opt_level="O1")
SHAPES = ((96, 64), (64,), (4096,), (65, 77), (7, 5), (64, 128), (64, 80), (3,), (0,), (80, 96))
MANY_BUCKETS = {"bucket_cap_mb": 0.02}


class Given(nn.Module):
    """Parameters whose gradients are given: independent Gaussians on each rank and in each step."""

    def __init__(self, shapes=SHAPES, dtype=torch.float32):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, step, used=None):
        used = range(len(self.weights)) if used is None else used
        return sum((self.weights[i] * self.given(i, step)).sum() for i in used)

    def given(self, i, step, rank=RANK):
        weight = self.weights[i]
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + i)
        return torch.randn(weight.shape, generator=generator).to(weight.dtype) * 2.0 ** (i - 5)

    def errors(self, step, steps=None, used=None):
        """The relative error of each gradient, against the average of what was given."""
        steps = [step] if steps is None else steps
        errors = []
        for i, weight in enumerate(self.weights):
            if not weight.numel() or (used is not None and i not in used):
                continue
            given = [self.given(i, s, rank).double() for s in steps for rank in range(RANKS)]
            exact = torch.stack(given).sum(0) / RANKS
            errors.append(float((weight.grad.double() - exact).norm() / exact.norm()))
        return errors


def wrapped(module=None, config=CONFIG, **options):
    ddp = DistributedDataParallel(module or Given(), **options)
    connect_ddp(ddp, [], config)
    return ddp


def grads(ddp):
    return [p.grad for p in ddp.parameters() if p.grad is not None]


def hook_of(ddp):
    return ddp._get_ddp_logging_data().get("comm_hook")


def num_buckets(ddp):
    data = ddp._get_ddp_logging_data()
    return len((data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(","))


def steps_of(ddp, steps=3):
    errors = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(step).backward()
        errors += ddp.module.errors(step)
    return max(errors), equal_on_ranks(grads(ddp)), hook_of(ddp)


@on_ranks(2)
def test_averages_are_those_of_float32_up_to_two_roundings_and_equal_on_all_ranks():
    for name, options in {
        "default": {},
        "buckets as views": {"gradient_as_bucket_view": True},
        "static graph": {"static_graph": True},
        "unused parameters": {"find_unused_parameters": True},
        "many buckets": MANY_BUCKETS,
        "many buckets as views": {**MANY_BUCKETS, "gradient_as_bucket_view": True},
        "many buckets, static graph": {**MANY_BUCKETS, "static_graph": True},
    }.items():
        ddp = wrapped(**options)
        error, equal, hook = steps_of(ddp)
        with count_communication() as count:
            ddp(3).backward()
        assert 0.01 < error < TWO_ROUNDINGS  # it is FP8, too
        assert equal
        assert hook == "average_bucket"
        sent = sum(row.calls for row in count.rows if row.kind == "all-to-all")
        assert (sent >= 4) is ("many" in name)


@on_ranks(2)
def test_buckets_of_every_dtype_and_kind():
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        error, equal, hook = steps_of(wrapped(Given(dtype=dtype)))
        assert error == 0 if dtype == torch.float64 else 0.01 < error < TWO_ROUNDINGS
        assert equal
        assert hook == "average_bucket"
    for module, most in (
        (Given([(64, 96), (128, 128)], torch.bfloat16), TWO_ROUNDINGS),
        (Given([(65, 77)]), TWO_ROUNDINGS),
        (Given([(5,), (100,)]), 0.006),  # BF16, twice
        (Given([(1,)]), 0.006),
    ):
        error, equal, _ = steps_of(wrapped(module))
        assert error < most
        assert equal


@on_ranks(2, 4)
def test_accumulated_gradients_are_averaged_once():
    for options in ({}, {"gradient_as_bucket_view": True}):
        ddp = wrapped(**MANY_BUCKETS, **options)
        for step in range(0, 9, 3):
            ddp.zero_grad()
            for i in range(3):
                with contextlib.nullcontext() if i == 2 else ddp.no_sync():
                    ddp(step + i).backward()
                if i == 1:
                    assert not equal_on_ranks(grads(ddp))
        assert max(ddp.module.errors(0, range(6, 9))) < TWO_ROUNDINGS
        assert equal_on_ranks(grads(ddp))


@on_ranks(2, 4)
def test_parameters_that_some_or_all_ranks_leave_out():
    ddp = wrapped(find_unused_parameters=True, **MANY_BUCKETS)
    unused = (0, 3, 5, 6)
    last = len(SHAPES) - 1
    for step in range(3):
        ddp.zero_grad()
        ddp(step, [i for i in range(last) if i != unused[RANK % 4]]).backward()
    module, exact = ddp.module, 0
    for rank in range(RANKS):
        exact = exact + (rank % 4 != 0) * module.given(0, 2, rank)
    exact = exact / RANKS
    assert (module.weights[0].grad - exact).norm() < TWO_ROUNDINGS * exact.norm()
    assert equal_on_ranks(grads(ddp))
    assert module.weights[last].grad is None


@on_ranks(2, 4)
def test_uneven_inputs_give_what_torchs_hooks_give():
    for divide in (True, False):
        ours, stock = wrapped(**MANY_BUCKETS), DistributedDataParallel(Given(), **MANY_BUCKETS)
        stock.register_comm_hook(None, allreduce_hook)
        for ddp in (ours, stock):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
            with ddp.join(divide_by_initial_world_size=divide):
                for step in range(RANKS - 1 - RANK):
                    optimizer.zero_grad()
                    ddp(step).backward()
                    optimizer.step()
        pairs = zip(ours.parameters(), stock.parameters(), strict=True)
        errors = [float(((p - q).norm() / q.norm()).detach()) for p, q in pairs if q.numel()]
        assert max(errors) < TWO_ROUNDINGS
        assert equal_on_ranks(ours.parameters())
        assert hook_of(ours) == "average_bucket"


@on_ranks(2)
def test_several_modules_in_one_backward():
    one, other = wrapped(**MANY_BUCKETS), wrapped(Given([(64, 96), (9,)]))
    third = DistributedDataParallel(Given())
    third.register_comm_hook(None, allreduce_hook)
    for step in range(3):
        for ddp in (one, other, third):
            ddp.zero_grad()
        (one(step) + other(step) + third(step)).backward()
    for ddp in (one, other):
        assert 0.01 < max(ddp.module.errors(2)) < TWO_ROUNDINGS
    assert max(third.module.errors(2)) < 1e-6


@on_ranks(4)
def test_a_process_group_of_some_ranks():
    half = RANKS // 2
    ranks = [range(half), range(half, RANKS)]
    groups = [dist.new_group(list(members)) for members in ranks]
    mine = RANK // half
    ddp = DistributedDataParallel(Given(), process_group=groups[mine])
    report = connect_ddp(ddp, [], CONFIG)
    ddp(0).backward()
    weight = ddp.module.weights[0]
    exact = sum(ddp.module.given(0, 0, rank) for rank in ranks[mine]) / half
    assert 0.01 < (weight.grad - exact).norm() / exact.norm() < TWO_ROUNDINGS
    assert str(report) == "2, gradients averaged in FP8, 1.03 bytes each"
    assert hook_of(ddp) == "average_bucket"


@on_ranks(2)
def test_sparse_gradients_are_averaged_as_without_us():
    for sparse_only in (True, False):
        torch.manual_seed(0)
        layers = [nn.Embedding(100, 64, sparse=True)]
        layers += [] if sparse_only else [nn.Linear(64, 64)]
        ours = wrapped(nn.Sequential(*layers))
        stock = DistributedDataParallel(copy.deepcopy(ours.module))
        for step in range(2):
            for ddp in (ours, stock):
                ddp.zero_grad()
                ddp(torch.arange(10 * RANK, 10 * RANK + 15 + step)).square().mean().backward()
        pairs = zip(grads(ours), grads(stock), strict=True)
        dense = [(p.to_dense(), q.to_dense()) for p, q in pairs]
        errors = [float((p - q).norm() / q.norm()) for p, q in dense]
        assert grads(ours)[0].is_sparse
        assert errors[0] == 0
        if not sparse_only:
            # these gradients are alike on both ranks, and so is rounding
            assert 0.01 < errors[1] < 0.03
            assert errors[2] < 0.006
        assert equal_on_ranks(grads(ours))


@on_ranks(2, 4)
def test_all_ranks_see_what_is_not_finite_on_one():
    ddp = wrapped(**MANY_BUCKETS)
    bad = {0: float("nan"), 1: float("inf")}
    for i, value in bad.items():
        weight = ddp.module.weights[i]
        place = torch.arange(weight.numel()).view(weight.shape) == 40
        if RANK == RANKS - 1:
            weight.register_hook(lambda g, p=place, v=value: torch.where(p, v, g))
    ddp(0).backward()
    seen = [int((~w.grad.isfinite()).sum()) for w in ddp.module.weights]
    assert seen == [32, 1] + [0] * 8
    assert equal_on_ranks(grads(ddp))


@on_ranks(2)
def test_a_users_hook_wins():
    told = {
        "before": "the communication hook .*users is registered",
        "built in": "the communication hook BuiltinCommHookType.ALLREDUCE is registered",
        "reason": "the host says so",
        "after": "FP8, 1.03 bytes each",  # nobody can know
        "built in, after": "FP8, 1.03 bytes each",
    }

    def users(state, bucket):
        return allreduce_hook(state, bucket)

    for when, text in told.items():
        ddp = DistributedDataParallel(Given())
        if when == "before":
            ddp.register_comm_hook(None, users)
        if when == "built in":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        reason = "the host says so" if when == "reason" else None
        report = connect_ddp(ddp, [], CONFIG, reason=reason)
        if when == "after":
            ddp.register_comm_hook(None, users)
        if when == "built in, after":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        error, equal, hook = steps_of(ddp)
        assert error < 1e-6
        assert equal
        assert hook != "average_bucket"
        assert re.search(text, str(report)), when


@on_ranks(2)
def test_off_is_torchs_all_reduce():
    ours = wrapped(config=FP8Config(opt_level="O1", communication="off"))
    stock = DistributedDataParallel(Given())
    for ddp in (ours, stock):
        ddp(0).backward()
    pairs = zip(grads(ours), grads(stock), strict=True)
    report = connect_ddp(ours, [], FP8Config(opt_level="O1", communication="off"))
    assert all(torch.equal(p, q) for p, q in pairs)
    assert str(report) == "2, gradients averaged in their dtype: communication='off'"


@on_ranks(2)
def test_copies_average_as_the_original():
    for steps in (0, 2):
        ddp = wrapped(**MANY_BUCKETS)
        if steps:
            steps_of(ddp, steps)
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        for twin in (
            copy.deepcopy(ddp),
            pickle.loads(pickle.dumps(ddp)),
            torch.load(file, weights_only=False),
        ):
            again = connect_ddp(twin, [], CONFIG)
            assert again.reason is None
            with twin.join():
                _averages_in_fp8(twin)
        _averages_in_fp8(ddp)


def _averages_in_fp8(ddp):
    error, equal, hook = steps_of(ddp)
    assert error < TWO_ROUNDINGS
    assert equal
    assert hook == "average_bucket"
    assert len(ddp._forward_pre_hooks) == 1


@on_ranks(2)
def test_each_bucket_is_sent_as_soon_as_it_is_full_in_one_order():
    """Every exchange but the last bucket's is issued before the last gradient is ready."""
    ddp = wrapped(**MANY_BUCKETS)
    steps_of(ddp, 2)
    events = []
    for i, weight in enumerate(ddp.module.weights):
        weight.register_post_accumulate_grad_hook(lambda _, i=i: events.append(f"ready {i}"))
    originals = dist.all_to_all_single, averaging._all_gather

    def to_all(*args, **kwargs):
        events.append("all-to-all")
        return originals[0](*args, **kwargs)

    def gather(*args, **kwargs):
        events.append("all-gather")
        return originals[1](*args, **kwargs)

    dist.all_to_all_single, averaging._all_gather = to_all, gather
    ddp(3).backward()
    dist.all_to_all_single, averaging._all_gather = originals
    dist.all_gather_object(every := [None] * RANKS, events)
    assert every[0] == every[1]
    count = num_buckets(ddp)
    assert count >= 4
    issued = [event for event in events if not event.startswith("ready")]
    first, others = ["all-to-all", "all-gather"], ["all-to-all", "all-gather"] * (count - 2)
    assert issued == [*first, "all-to-all", *others, "all-gather"]
    last_ready = max(i for i, event in enumerate(events) if event.startswith("ready"))
    assert events[:last_ready].count("all-to-all") == count - 1
    assert events[:last_ready].count("all-gather") == count - 2


@on_ranks(2, 4)
def test_bytes_sent_are_a_quarter_of_float32s_and_half_of_bf16s():
    for level in ("O1", "O2", "O3"):
        torch.manual_seed(0)
        layers = [nn.Embedding(300, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)]
        model = nn.Sequential(*layers, nn.LayerNorm(128), nn.Linear(128, 300))
        config = FP8Config(opt_level=level)
        optimizer, _ = adamw(model, config, lr=1e-3)
        numel = sum(p.numel() for p in model.parameters())
        ddp = DistributedDataParallel(model, **ddp_options(model, [optimizer]))
        connect_ddp(ddp, [optimizer], config)
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + RANK)
            tokens = torch.randint(300, (4, 16), generator=generator)
            with count_communication() as count, torch.autocast("cpu", torch.bfloat16):
                ddp(tokens).float().square().mean().backward()
            optimizer.step()
        all_reduce = 2 * (RANKS - 1) / RANKS * numel
        kinds = {(row.kind, row.dtype) for row in count.rows}
        assert kinds == {("all-gather", torch.uint8), ("all-to-all", torch.uint8)}
        assert count.bytes_sent <= 0.53 * 2 * all_reduce
        assert sum(row.calls for row in count.rows) <= 6


@on_ranks(2)
def test_after_a_backward_that_raised_the_next_is_right():
    ddp = wrapped(**MANY_BUCKETS)
    steps_of(ddp, 2)

    def fail(_):
        raise ArithmeticError

    handle = ddp.module.weights[-1].register_hook(fail)  # the first gradient of all
    with contextlib.suppress(ArithmeticError):
        ddp(2).backward()
    handle.remove()
    error, equal, _ = steps_of(ddp)
    assert error < TWO_ROUNDINGS
    assert equal


@on_ranks(2)
def test_a_single_rank_exchanges_nothing():
    group = [dist.new_group([rank]) for rank in range(RANKS)][RANK]
    ddp = DistributedDataParallel(Given(), process_group=group)
    report = connect_ddp(ddp, [], CONFIG)
    ddp(0).backward()
    module = ddp.module
    assert all(torch.equal(w.grad, module.given(i, 0)) for i, w in enumerate(module.weights))
    assert str(report) == "1, so nothing is exchanged"
    assert hook_of(ddp) is None


@pytest.mark.parametrize("start", [0, 1, 65])
def test_what_travels_behind_an_odd_bias_is_aligned(start):
    buffer = torch.randn(start + 4096).bfloat16()
    runs = [Run(start, start + 4096, True)]
    packed = joined(buffer, runs, 32)
    assert torch.equal(packed, buffer[start:])
    decoded, stays = target_of(buffer, runs, 4096, (torch.bfloat16,))
    assert packed.data_ptr() % 16 == decoded.data_ptr() % 16 == 0
    in_place = decoded.data_ptr() == buffer[start:].data_ptr()
    assert in_place == stays == (start == 0), "in its own place where that is aligned"


def test_neighbours_of_a_kind_travel_as_one_run():
    buffer = torch.zeros(26518)
    gradients, start = [], 0
    for shape in ((64, 64), (64, 80), (4096,), (5,), (65, 77), (64, 64), (64, 64), (2, 2)):
        numel = torch.Size(shape).numel()
        gradients.append(buffer[start : start + numel].view(shape))
        start += numel
    assert runs_of(pieces_of(buffer, gradients)) == [
        Run(0, 9216, True),
        Run(9216, 13317, False),
        Run(13317, 18322, True),
        Run(18322, 26514, True),
        Run(26514, 26518, False),
    ]
