"""The bytes that a run holds between steps, and those that it sends, counted by the training code.

Persistent bytes (weights, gradients, states) are those of the whole model. It is converted, sharded
by FSDP2 over the run's number of ranks, of which this process is one, and counted by
`torch_fp8.conversion.memory`. What a layer adds is the difference between a model with one layer of
each kind and a model with one more.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch_fp8.conversion.memory import MemoryReport, expected_memory
from torch_fp8_tools.plan.followed_step import StepBytes
from torch_fp8_tools.plan.layouts import text_of
from torch_fp8_tools.plan.models import fake_ranks, leave_stage, make_model, prepare, stages
from torch_fp8_tools.plan.setup import BF16, Setup


def standing_bytes(setup: Setup, role: str, level: str) -> MemoryReport:
    """Count weights, gradients and states on the fullest GPU, exactly.

    Args:
        setup: the planned run.
        role: one of `torch_fp8_tools.plan.setup.ROLES`.
        level: one of `torch_fp8_tools.plan.setup.LEVELS`.
    """

    def report(stage: str, layers: Sequence[int]) -> Counter[str]:
        model = make_model(setup, role, level, layers)
        leave_stage(model, stage)
        with fake_ranks(setup.fsdp) as mesh:
            optimizers = prepare(model, setup, role, level, mesh)
            counted = expected_memory(model, optimizers, summed=setup.accumulate > 1)
        return Counter(dataclasses.asdict(counted))

    counts = [by_layers(setup, layers, partial(report, stage)) for stage, layers in stages(setup)]
    return max((MemoryReport(**each) for each in counts), key=lambda report: report.total)


def by_layers(
    setup: Setup, layers: Sequence[int], count: Callable[[Sequence[int]], Counter[Any]]
) -> Counter[Any]:
    """Count something of a model to which each layer of a kind adds the same.

    Args:
        setup: the planned run.
        layers: the layers of the model.
        count: takes layers, returns the count of a model with these only.
    """
    if not setup.layers.separate:
        return count(layers)
    alike: dict[Any, list[int]] = {}
    for layer in layers:
        alike.setdefault(setup.layers.contents[layer], []).append(layer)
    few = [members[0] for members in alike.values()]
    first = count(few)
    total = Counter(first)
    for members in alike.values():
        if len(members) > 1:
            more = count(sorted([*few, members[1]]))
            for key in more:
                total[key] += (more[key] - first[key]) * (len(members) - 1)
    return total


def wire_bytes(setup: Setup, trained: float, step: StepBytes, level: str) -> float:
    """Return the bytes that a GPU sends in an optimizer step.

    FSDP2's bytes are counted. Replicas exchange gradients once: DDP all-reduces them in float32
    (BF16-mixed), and replicas of FSDP2 shards (HSDP) in BF16. With FP8 both send 8-bit values in
    groups of 32 with a scale each. Tensor parallelism all-reduces BF16 activations, twice in
    forward and twice in backward of each layer.

    Args:
        setup: the planned run.
        trained: the number of elements of a GPU's gradients.
        step: the counted bytes of a step.
        level: one of `torch_fp8_tools.plan.setup.LEVELS`.
    """
    fsdp = (step.gathered + step.scattered) * setup.accumulate
    plain = 2.0 if setup.fsdp > 1 else 4.0
    each = plain if level == BF16 else 1 + 1 / 32
    replicas = 2 * (setup.data - 1) / setup.data * each * trained
    layers = -(-text_of(setup.config).num_hidden_layers // setup.pipeline)
    activations = 2 * setup.tokens * text_of(setup.config).hidden_size * setup.accumulate
    ring = 2 * (setup.tensor - 1) / setup.tensor
    return fsdp + replicas + 4 * layers * ring * activations
