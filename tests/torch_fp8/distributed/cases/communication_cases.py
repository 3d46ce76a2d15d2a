"""Counts known collectives on one of four gloo ranks; what each case returns is written as JSON.

Started by test_communication_count.py:
``python communication_cases.py <rank> <ranks> <store> <result>``.
"""

import json
import os
import sys
import time
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tests.comm_counter import count_communication

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])


def rows(count):
    made = []
    for row in count.rows:
        dtype = str(row.dtype).removeprefix("torch.")
        made.append([row.kind, dtype, row.ranks, row.calls, row.payload_bytes, row.bytes_sent])
    return made


def counting(function):
    """What `function` communicates."""
    with count_communication() as count:
        function()
    return rows(count)


def floats(n):
    return torch.ones(n)


def model_of(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))


def train(model, width=8):
    model(torch.ones(2, width)).float().square().sum().backward()


def case_collectives():
    """One of each on 8 float32 for a rank, or as many for each rank: 32 or 128 bytes."""
    parts = list(floats(32).chunk(4))
    empty = [torch.empty(8) for _ in range(4)]
    calls = {
        "all-reduce": lambda: dist.all_reduce(floats(8)),
        "all-gather": lambda: dist.all_gather(empty, floats(8)),
        "all-gather of one": lambda: dist.all_gather_into_tensor(torch.empty(32), floats(8)),
        "reduce-scatter": lambda: dist.reduce_scatter(torch.empty(8), parts),
        "reduce-scatter of one": lambda: dist.reduce_scatter_tensor(torch.empty(8), floats(32)),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty(32), floats(32)),
        "broadcast": lambda: dist.broadcast(floats(8), 1),
        "reduce": lambda: dist.reduce(floats(8), 1),
        "gather": lambda: dist.gather(floats(8), empty if RANK == 1 else None, 1),
        "scatter": lambda: dist.scatter(torch.empty(8), parts if RANK == 1 else None, 1),
        "barrier": dist.barrier,
    }
    return {name: counting(call) for name, call in calls.items()}


def case_uneven():
    """Rank r keeps r + 1 rows of 10, and sends the other rows."""
    splits = [1, 2, 3, 4]
    output = torch.empty(4 * splits[RANK], dtype=torch.bfloat16)
    whole = torch.ones(10, dtype=torch.bfloat16)
    return counting(lambda: dist.all_to_all_single(output, whole, [splits[RANK]] * 4, splits))


def case_asynchronous():
    def call():
        works = [dist.all_reduce(floats(8), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()

    return counting(call)


def case_point_to_point():
    """Around a ring, by two means."""

    def call():
        after, before = (RANK + 1) % 4, (RANK - 1) % 4
        works = [dist.isend(floats(8), after), dist.irecv(torch.empty(8), before)]
        operations = [
            dist.P2POp(dist.isend, torch.ones(8, dtype=torch.uint8), after),
            dist.P2POp(dist.irecv, torch.empty(8, dtype=torch.uint8), before),
        ]
        for work in [*works, *dist.batch_isend_irecv(operations)]:
            work.wait()

    return counting(call)


def case_objects():
    return counting(lambda: dist.all_gather_object([None] * 4, {"rank": RANK}))


def case_groups():
    """Of two and of four ranks."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def call():
        dist.all_reduce(floats(8), group=pairs[RANK // 2])
        dist.all_reduce(floats(8))

    return counting(call)


def case_functional():
    def call():
        group = dist.group.WORLD
        made = [
            functional.all_reduce(floats(8), "sum", group),
            functional.all_gather_tensor(floats(8), 0, group),
            functional.all_gather_tensor_autograd(floats(8).requires_grad_(), 0, group),
            functional.reduce_scatter_tensor(floats(32), "sum", 0, group),
            functional.all_to_all_single(floats(32), None, None, group),
            functional.broadcast(floats(8), 1, group),
        ]
        for tensor in made:
            tensor + 1

    return counting(call)


def case_functional_backward():
    x = floats(8).requires_grad_()

    def call():
        # torch 2.11 scatters contiguous gradients only.
        (
            functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD) * floats(32)
        ).sum().backward()

    return counting(call), torch.equal(x.grad, 4 * floats(8))


def case_dtensor():
    """A redistribution in forward; in backward each rank keeps its part of the gradient."""
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]).requires_grad_()

    def call():
        (x.redistribute(mesh, [Replicate()]).to_local() * RANK).sum().backward()

    counts = counting(call)
    return counts, torch.equal(x.grad.to_local(), torch.full((2, 8), float(RANK)))


def case_operator_of_dtensor():
    """A product that gathers an operand by itself, within DTensor's own dispatch."""
    mesh = init_device_mesh("cpu", (4,))
    a, b = (distribute_tensor(torch.ones(8, 8), mesh, [Shard(1)]) for _ in range(2))
    return counting(lambda: a @ b)


def case_tensor_parallel():
    mesh = init_device_mesh("cpu", (4,))
    model = parallelize_module(model_of(), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    x = torch.ones(2, 8, requires_grad=True)
    return counting(lambda: model(x).sum().backward())


def case_data_parallel():
    """The reducer's all-reduce, of 128 float32, and of FP16 through a stock hook."""
    made = []
    for hook in (None, default_hooks.fp16_compress_hook):
        model = DistributedDataParallel(model_of())
        if hook is not None:
            model.register_comm_hook(None, hook)
        made.append(counting(lambda model=model: train(model)))
    return made


def case_callback():
    """A hook whose second collective is issued in gloo's thread."""

    def hook(_, bucket):
        message = floats(16)
        time.sleep(0.2 * RANK)  # the others' callbacks run when this rank has come

        def again(_):
            dist.all_reduce(message)
            return bucket.buffer()

        work = dist.all_to_all_single(torch.empty(16), message, async_op=True)
        return work.get_future().then(again)

    model = DistributedDataParallel(model_of())
    model.register_comm_hook(None, hook)
    return counting(lambda: train(model))


def case_fsdp():
    """Two modules of 64 weights: BF16 gathers forward and backward, BF16 scatters."""
    made = {}
    for again in (True, False):
        model = model_of()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for part in (*model, model):
            fully_shard(part, mp_policy=policy, reshard_after_forward=again)
        made[str(again)] = counting(lambda model=model: train(model))
    return made


def case_compiled():
    """Compiled graphs stay compiled; their collectives are counted."""
    runs = []

    def backend(graph, _):
        runs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def reduce(x):
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    counts = [counting(lambda: reduce(floats(8))) for _ in range(2)]
    return counts, len(runs)


def case_nested():
    with count_communication() as outer:
        dist.all_reduce(floats(8))
        with count_communication() as inner:
            dist.all_reduce(floats(8))
        dist.all_reduce(floats(8))
    dist.all_reduce(floats(8))
    return rows(outer), rows(inner), is_in_torch_dispatch_mode()


def case_results():
    """Weights after training, with and without counting."""
    made = []
    for count in (False, True):
        model = DistributedDataParallel(model_of())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):

            def one(step=step, model=model, optimizer=optimizer):
                generator = torch.Generator().manual_seed(10 * step + RANK)
                model(torch.randn(4, 8, generator=generator)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            counting(one) if count else one()
        made.append([p.detach().clone() for p in model.parameters()])
    return all(map(torch.equal, *made))


def case_after_an_error():
    try:
        with count_communication():
            raise KeyError
    except KeyError:
        return counting(lambda: dist.all_reduce(floats(8))), is_in_torch_dispatch_mode()


class Plain(torch.Tensor):
    """A subclass that leaves dispatch alone, as Parameter does."""

    __torch_dispatch__ = torch._C._disabled_torch_dispatch_impl


def case_subclasses():
    def call():
        dist.all_reduce(floats(8).as_subclass(Plain))
        dist.all_reduce(nn.Parameter(floats(8)).data)
        with torch.no_grad():
            dist.broadcast(nn.Parameter(floats(8)), 0)

    return counting(call)


def case_table():
    with count_communication() as count:
        dist.all_reduce(floats(2000))
        dist.all_reduce(torch.ones(8, dtype=torch.bfloat16))
        dist.broadcast(torch.ones(8, dtype=torch.uint8), 0)
    some = count.of("all-reduce")
    one = count.of("all-reduce", torch.bfloat16, 4)
    none = count.of(ranks=2)
    return {
        "text": str(count),
        "all": [count.calls, count.payload_bytes, count.bytes_sent],
        "some": [some.calls, some.payload_bytes, some.bytes_sent],
        "one": [one.calls, one.payload_bytes, one.bytes_sent],
        "none": [none.calls, none.payload_bytes, none.bytes_sent],
    }


def main():
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=WORLD
    )
    results = {}
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            try:
                results[name.removeprefix("case_")] = {"value": case()}
            except BaseException:
                results[name.removeprefix("case_")] = {"error": traceback.format_exc()}
    with open(sys.argv[4], "w") as file:
        json.dump(results, file)
    dist.barrier()
    os._exit(0)  # gloo may hang at exit


main()
