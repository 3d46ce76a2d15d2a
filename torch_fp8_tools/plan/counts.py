"""The bytes that a run holds and sends, counted on tensors without memory by the training code.

Persistent bytes (weights, gradients, states) are those of the whole model. It is converted, sharded
by FSDP2 over the run's number of ranks, of which this process is one, and counted by
`torch_fp8.conversion.memory`. If all layers hold the same, the difference between models with one
and two layers is what a layer adds. Bytes that exist only within a step are followed storage by
storage through a step of two models with a few layers, and the difference is the cost of a layer.
"""

import contextlib
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_fp8.conversion.memory import MemoryReport, expected_memory
from torch_fp8.distributed.fsdp.split_weights import fsdp_params
from torch_fp8_tools.plan.experts import GroupedInBF16
from torch_fp8_tools.plan.fake_ranks import SentBytes, fake_ranks
from torch_fp8_tools.plan.layouts import blocks_of, period
from torch_fp8_tools.plan.memory_tracker import MemoryTracker
from torch_fp8_tools.plan.models import (
    connect,
    make_model,
    only_stage,
    optimizers_of,
    shard,
    sharded,
    stages,
)
from torch_fp8_tools.plan.setup import BF16, JUDGES, TRAINED, Setup

_FEWEST_LAYERS, _FEWEST_SHARDED = 2, 3
"""The number of layers of the smaller model. With three layers there is one between the first and
the last, for which FSDP2 gathers the next one's weights ahead.
"""
_MOST_FAKE_RANKS = 64
"""The maximum number of ranks for counting a step. The bytes of a larger ring differ by 1/64 at
most, and are scaled.
"""


@dataclass(frozen=True)
class StepBytes:
    """The bytes of a GPU's micro-batch that exist only within its step.

    Attributes:
        forward: the peak beyond the persistent bytes until the last layer's backward ends.
        backward: the peak after that, including gradients.
        saved: the part of `forward` that is saved for backward.
        gathered, scattered: the bytes that FSDP2 sends for weights and for gradients.
    """

    forward: float
    backward: float
    saved: float
    gathered: float
    scattered: float


def standing_bytes(setup: Setup, role: str, level: str) -> MemoryReport:
    """Count weights, gradients and states on the fullest GPU, exactly.

    Args:
        setup: the planned run.
        role: one of `torch_fp8_tools.plan.setup.ROLES`.
        level: one of `torch_fp8_tools.plan.setup.LEVELS`.
    """

    def report(stage: str, layers: int) -> Counter[str]:
        model = make_model(setup, role, level, layers=layers)
        with only_stage(model, stage), fake_ranks(setup.fsdp) as mesh:
            optimizers = sharded(model, setup, role, level, mesh)
            counted = expected_memory(model, optimizers, summed=setup.accumulate > 1)
        return Counter(dataclasses.asdict(counted))

    counts = [by_layers(setup, n, partial(report, stage)) for stage, n in stages(setup)]
    return max((MemoryReport(**each) for each in counts), key=lambda report: report.total)


def by_layers(setup: Setup, layers: int, count: Callable[[int], Counter[Any]]) -> Counter[Any]:
    """Count something of a model from its first two layers, if each layer adds the same.

    Args:
        setup: the planned run.
        layers: the number of layers of the model.
        count: takes a number of layers, returns the count of a model with so many.
    """
    if layers <= 2 or not setup.layers_alike:
        return count(layers)
    one, two = count(1), count(2)
    return Counter({key: one[key] + (two[key] - one[key]) * (layers - 1) for key in two})


def step_bytes(setup: Setup, role: str, level: str) -> StepBytes:
    """Count the bytes that a model's step holds and sends beyond the persistent ones."""
    unit = period(setup.config)
    fewest = _FEWEST_SHARDED if setup.fsdp > 1 else _FEWEST_LAYERS
    few, more = (_few_layers(setup, role, level, n * unit) for n in (fewest, fewest + 1))
    layers = stages(setup)[0][1]
    total = {
        name: getattr(few, name)
        + (getattr(more, name) - getattr(few, name)) * (layers / unit - fewest)
        for name in StepBytes.__dataclass_fields__
    }
    return StepBytes(**total)


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
    return fsdp + _replica_bytes(setup, trained, level) + _tensor_bytes(setup)


def _replica_bytes(setup: Setup, elements: float, level: str) -> float:
    """Return the bytes of a rank's shards in the gradient exchange between replicas."""
    plain = 2.0 if setup.fsdp > 1 else 4.0
    each = plain if level == BF16 else 1 + 1 / 32
    return 2 * (setup.data - 1) / setup.data * each * elements


def _tensor_bytes(setup: Setup) -> float:
    if setup.tensor == 1:
        return 0.0
    text = setup.config.get_text_config()
    layers = -(-text.num_hidden_layers // setup.pipeline)
    ring = 2 * (setup.tensor - 1) / setup.tensor
    return 4 * layers * ring * 2 * setup.tokens * text.hidden_size * setup.accumulate


def _few_layers(setup: Setup, role: str, level: str, layers: int) -> StepBytes:
    """Run a step of a model with a few layers on fake tensors."""
    ranks = min(setup.fsdp, _MOST_FAKE_RANKS)
    model = make_model(setup, role, level, layers=layers)
    trained = role in TRAINED
    if trained and level not in (BF16, "O1"):
        _split(model, setup, role, level, all_of_them=ranks > 1)
    sent = SentBytes()
    with warnings.catch_warnings(), fake_ranks(ranks) as mesh:
        warnings.simplefilter("ignore")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            if hasattr(model, "tie_weights"):
                model.tie_weights()
            if mesh is not None:
                shard(model, mesh)
                connect(model, setup, level)
            # The first run creates what later runs reuse; only FSDP2 needs its backward for that.
            _run(model, setup, role, trained=trained and mesh is not None)
            tracker = _standing(model)
            if mesh is not None:
                tracker.resized = _gathered(model)
            watch = _Watch(tracker, blocks_of(model))
            before = tracker.total
            with tracker, contextlib.nullcontext() if mesh is None else sent:
                _run(model, setup, role, trained=trained)
            watch.remove()
    factor = _ring(setup.fsdp) / _ring(ranks) if ranks > 1 else 1.0
    return StepBytes(
        forward=max(watch.forward, 0 if trained else tracker.peak_total) - before,
        backward=tracker.peak_total - before if trained else 0.0,
        saved=watch.saved,
        gathered=sent.gathered * factor,
        scattered=sent.scattered * factor,
    )


def _split(model: nn.Module, setup: Setup, role: str, level: str, *, all_of_them: bool) -> None:
    """Make the weights BF16 that training splits; under FSDP2 these are all trained weights."""
    optimizers_of(model, setup, role, level)
    for parameter in model.parameters() if all_of_them else ():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


def _run(model: nn.Module, setup: Setup, role: str, *, trained: bool) -> None:
    tokens = torch.zeros((setup.micro_batch, setup.sequence), dtype=torch.long)
    labels = tokens[:, :1].float() if role in JUDGES else tokens
    model.zero_grad(set_to_none=True)
    autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast, GroupedInBF16(), torch.set_grad_enabled(trained):
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
    if trained:
        loss.backward()


def _standing(model: nn.Module) -> MemoryTracker:
    model.zero_grad(set_to_none=True)
    tracker = MemoryTracker(model.parameters())
    for tensor in (*model.parameters(), *model.buffers()):
        tracker.assign(tensor, "weights")
    tracker.reset_peak()
    return tracker


def _gathered(model: nn.Module) -> Callable[[], list[Tensor]]:
    """Return a function that lists the tensors that FSDP2 gathers into and frees by resizing."""
    params = fsdp_params(model)
    return lambda: [tensor for param in params for tensor in param.all_gather_outputs]


class _Watch:
    """The peak before the last block's backward ends, and the peak after it.

    The first peak includes the gradients of one of many layers, the second those of all.
    """

    def __init__(self, tracker: MemoryTracker, blocks: list[nn.Module]) -> None:
        self.tracker, self.forward, self.saved = tracker, 0, 0
        self._before = blocks[-1].register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad and not self.forward:
            hidden.register_hook(self._mark)

    def _mark(self, grad: Tensor) -> None:
        if not self.forward:
            self.forward = self.tracker.peak_total
            self.saved = self.tracker.peak["saved activations"]
            self.tracker.reset_peak()

    def remove(self) -> None:
        self._before.remove()


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks
