"""The communication hook of DistributedDataParallel; run by run_cases.py."""

import contextlib
import copy
import io
import pickle

import torch
import torch.distributed as dist
from run_cases import RANK, RANKS, equal_on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.comm_counter import count_communication
from tests.internals import averaging, sqnr_db, worst_row_sqnr_db
from tests.steps import adamw
from torch_fp8 import FP8Config
from torch_fp8.distributed import connect_ddp, ddp_options

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


def case_options():
    made = {}
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
        made[name] = steps_of(ddp)
        with count_communication() as count:
            ddp(3).backward()
        made[name] += (sum(row.calls for row in count.rows if row.kind == "all-to-all"),)
    return made


def case_static_graph_of_two_dtypes():
    module = Given([*SHAPES, (64, 64), (9,)])
    for i in (1, 3, len(SHAPES)):
        module.weights[i].data = module.weights[i].data.bfloat16()
    return steps_of(wrapped(module, static_graph=True, **MANY_BUCKETS))


def case_dtypes():
    made = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        made[str(dtype)] = steps_of(wrapped(Given(dtype=dtype)))
    made["matrices"] = steps_of(wrapped(Given([(64, 96), (128, 128)], torch.bfloat16)))
    made["one odd matrix"] = steps_of(wrapped(Given([(65, 77)])))
    made["vectors"] = steps_of(wrapped(Given([(5,), (100,)])))
    made["one element"] = steps_of(wrapped(Given([(1,)])))
    return made


def case_accumulation():
    made = []
    for options in ({}, {"gradient_as_bucket_view": True}):
        ddp = wrapped(**MANY_BUCKETS, **options)
        for step in range(0, 9, 3):
            ddp.zero_grad()
            for i in range(3):
                with contextlib.nullcontext() if i == 2 else ddp.no_sync():
                    ddp(step + i).backward()
                if i == 1:
                    local = equal_on_ranks(grads(ddp))
        made.append([local, max(ddp.module.errors(0, range(6, 9))), equal_on_ranks(grads(ddp))])
    return made


def case_unused():
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
    return [
        float((module.weights[0].grad - exact).norm() / exact.norm()),
        equal_on_ranks(grads(ddp)),
        module.weights[last].grad is None,
    ]


def case_join():
    made = []
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
        made.append([max(errors), equal_on_ranks(ours.parameters()), hook_of(ours)])
    return made


def case_several():
    one, other = wrapped(**MANY_BUCKETS), wrapped(Given([(64, 96), (9,)]))
    third = DistributedDataParallel(Given())
    third.register_comm_hook(None, allreduce_hook)
    for step in range(3):
        for ddp in (one, other, third):
            ddp.zero_grad()
        (one(step) + other(step) + third(step)).backward()
    return [max(ddp.module.errors(2)) for ddp in (one, other, third)]


def case_subgroup():
    half = RANKS // 2
    ranks = [range(half), range(half, RANKS)]
    groups = [dist.new_group(list(members)) for members in ranks]
    mine = RANK // half
    ddp = DistributedDataParallel(Given(), process_group=groups[mine])
    report = connect_ddp(ddp, [], CONFIG)
    ddp(0).backward()
    weight = ddp.module.weights[0]
    exact = sum(ddp.module.given(0, 0, rank) for rank in ranks[mine]) / half
    return [float((weight.grad - exact).norm() / exact.norm()), str(report), hook_of(ddp)]


def case_sparse():
    made = []
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
        made.append([grads(ours)[0].is_sparse, *errors, equal_on_ranks(grads(ours))])
    return made


def case_not_finite():
    ddp = wrapped(**MANY_BUCKETS)
    bad = {0: float("nan"), 1: float("inf")}
    for i, value in bad.items():
        weight = ddp.module.weights[i]
        place = torch.arange(weight.numel()).view(weight.shape) == 40
        if RANK == RANKS - 1:
            weight.register_hook(lambda g, p=place, v=value: torch.where(p, v, g))
    ddp(0).backward()
    seen = [int((~w.grad.isfinite()).sum()) for w in ddp.module.weights]
    return [seen, equal_on_ranks(grads(ddp))]


def case_users_hook():
    made = {}

    def users(state, bucket):
        return allreduce_hook(state, bucket)

    for when in ("before", "after", "built in", "built in, after"):
        ddp = DistributedDataParallel(Given())
        if when == "before":
            ddp.register_comm_hook(None, users)
        if when == "built in":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        report = connect_ddp(ddp, [], CONFIG)
        if when == "after":
            ddp.register_comm_hook(None, users)
        if when == "built in, after":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        made[when] = [*steps_of(ddp), str(report)]
    ddp = DistributedDataParallel(Given())
    report = connect_ddp(ddp, [], CONFIG, reason="the host says so")
    made["reason"] = [*steps_of(ddp), str(report)]
    return made


def case_off():
    ours = wrapped(config=FP8Config(opt_level="O1", communication="off"))
    stock = DistributedDataParallel(Given())
    for ddp in (ours, stock):
        ddp(0).backward()
    pairs = zip(grads(ours), grads(stock), strict=True)
    report = connect_ddp(ours, [], FP8Config(opt_level="O1", communication="off"))
    return [all(torch.equal(p, q) for p, q in pairs), str(report)]


def case_copies():
    made = []
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
            with twin.join():
                made.append([*steps_of(twin), len(twin._forward_pre_hooks), again.reason])
        made.append([*steps_of(ddp), len(ddp._forward_pre_hooks), None])
    return made


def case_order():
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
    return [events, num_buckets(ddp)]


def case_bytes():
    """Bytes sent by the exchange, by a float32 all-reduce and a BF16 one of the same gradients."""
    made = {}
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
        kinds = sorted({(row.kind, str(row.dtype)) for row in count.rows})
        sent = count.bytes_sent / all_reduce
        made[level] = [sent / 4, sent / 2, kinds, sum(row.calls for row in count.rows)]
    return made


def case_compiled():
    made = []
    for when in ("before", "after"):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)))
        if when == "before":
            connect_ddp(ddp, [], CONFIG)
        compiled = torch.compile(ddp, backend="aot_eager")
        connect_ddp(compiled, [], CONFIG)
        for _step in range(3):
            ddp.zero_grad()
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(RANK))
            compiled(x).sum().backward()
        made.append([equal_on_ranks(grads(ddp)), hook_of(ddp)])
    return made


def case_after_an_error():
    ddp = wrapped(**MANY_BUCKETS)
    steps_of(ddp, 2)

    def fail(_):
        raise ArithmeticError

    handle = ddp.module.weights[-1].register_hook(fail)  # the first gradient of all
    with contextlib.suppress(ArithmeticError):
        ddp(2).backward()
    handle.remove()
    return steps_of(ddp)


def case_sqnr():
    """Independent Gaussian gradients; rows of one size, and of sizes from 2^-8 to 2^8."""
    made = []
    for spread in (torch.ones(512, 1), 2.0 ** torch.linspace(-8, 8, 512)[:, None]):
        module = Given([(512, 512)])
        given = [module.given(0, 0, rank) * spread for rank in range(RANKS)]
        ddp = wrapped(module)
        ddp.module.given = lambda i, step, given=given: given[RANK]
        ddp(0).backward()
        exact = torch.stack(given).double().mean(0)
        grad = module.weights[0].grad
        made.append([sqnr_db(exact, grad), worst_row_sqnr_db(exact, grad)])
    return made


def case_one_rank():
    group = [dist.new_group([rank]) for rank in range(RANKS)][RANK]
    ddp = DistributedDataParallel(Given(), process_group=group)
    report = connect_ddp(ddp, [], CONFIG)
    ddp(0).backward()
    module = ddp.module
    exact = all(torch.equal(w.grad, module.given(i, 0)) for i, w in enumerate(module.weights))
    return [exact, str(report), hook_of(ddp)]
