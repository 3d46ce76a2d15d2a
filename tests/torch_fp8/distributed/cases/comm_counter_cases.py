"""Counts known collectives on four ranks; run by run_cases.py."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from run_cases import RANK
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tests.comm_counter import count_communication


def counting(function):
    """What `function` communicates."""
    with count_communication() as count:
        function()
    return [
        [row.kind, str(row.dtype)[6:], row.ranks, row.calls, row.payload_bytes, row.bytes_sent]
        for row in count.rows
    ]


def floats(n):
    return torch.ones(n)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


def train(model):
    model(torch.ones(2, 8)).float().square().sum().backward()


def case_collectives():
    """One of each on 8 float32 for a rank, or as many for each rank: 32 or 128 bytes."""
    parts, group = list(floats(32).chunk(4)), dist.group.WORLD
    empty = [torch.empty(8) for _ in range(4)]
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][RANK // 2]
    x = floats(8).requires_grad_()
    calls = {
        "all-reduce": lambda: dist.all_reduce(floats(8)),
        "all-reduce, asynchronous": lambda: dist.all_reduce(floats(8), async_op=True).wait(),
        "all-reduce, functional": lambda: functional.all_reduce(floats(8), "sum", group) + 1,
        "pair": lambda: dist.all_reduce(floats(8), group=pair),
        "all-gather": lambda: dist.all_gather(empty, floats(8)),
        "all-gather of one": lambda: dist.all_gather_into_tensor(torch.empty(32), floats(8)),
        "all-gather, functional": lambda: functional.all_gather_tensor(floats(8), 0, group) + 1,
        "all-gather, with gradients": lambda: functional.all_gather_tensor_autograd(x, 0, group),
        "reduce-scatter": lambda: dist.reduce_scatter(torch.empty(8), parts),
        "reduce-scatter of one": lambda: dist.reduce_scatter_tensor(torch.empty(8), floats(32)),
        "reduce-scatter, functional": lambda: (
            functional.reduce_scatter_tensor(floats(32), "sum", 0, group) + 1
        ),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty(32), floats(32)),
        "all-to-all, functional": lambda: (
            functional.all_to_all_single(floats(32), None, None, group) + 1
        ),
        "broadcast": lambda: dist.broadcast(floats(8), 1),
        "broadcast, functional": lambda: functional.broadcast(floats(8), 1, group) + 1,
        "barrier": dist.barrier,
    }
    return {name: counting(call) for name, call in calls.items()}


def case_uneven():
    """Rank r keeps r + 1 rows of 10, and sends the other rows."""
    splits = [1, 2, 3, 4]
    output = torch.empty(4 * splits[RANK], dtype=torch.bfloat16)
    whole = torch.ones(10, dtype=torch.bfloat16)
    return counting(lambda: dist.all_to_all_single(output, whole, [splits[RANK]] * 4, splits))


def case_dtensor():
    """A redistribution in forward, and a product that gathers an operand by itself."""
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]).requires_grad_()
    a, b = (distribute_tensor(torch.ones(8, 8), mesh, [Shard(1)]) for _ in range(2))
    whole = counting(lambda: x.redistribute(mesh, [Replicate()]).to_local().sum().backward())
    return whole, counting(lambda: a @ b)


def case_data_parallel():
    """The reducer's all-reduce, of 128 float32, and of FP16 through a stock hook."""
    counts = []
    for hook in (None, default_hooks.fp16_compress_hook):
        model = DistributedDataParallel(model_of())
        if hook is not None:
            model.register_comm_hook(None, hook)
        counts.append(counting(lambda model=model: train(model)))
    return counts


def case_fsdp():
    """Two modules of 64 weights: BF16 gathers forward and backward, BF16 scatters."""
    model = model_of()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in (*model, model):
        fully_shard(part, mp_policy=policy)
    return counting(lambda: train(model))


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
    """Contexts within contexts count each; the inner one ends with an error."""
    inner = []

    def run():
        try:
            with count_communication() as count:
                dist.all_reduce(floats(8))
                raise KeyError
        except KeyError:
            inner.append(count.calls)
        dist.all_reduce(floats(8))

    return counting(run), inner, is_in_torch_dispatch_mode()
