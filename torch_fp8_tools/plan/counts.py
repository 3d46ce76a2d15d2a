"""The bytes of a run, counted by the training code on tensors without memory.

Bytes that persist between steps (weights, gradients, states) are those of the whole model. It is
converted, sharded by FSDP2 over the run's number of ranks, of which this process is one, and
counted by `torch_fp8.conversion.memory`.

Bytes that exist only within a step are counted in one step of a model with a few layers
(`torch_fp8_tools.plan.followed_step`). The step of the whole model is put together from its parts:
each layer has a twin among the few (`torch_fp8_tools.plan.layers`).
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_fp8.conversion.memory import MemoryReport, expected_memory
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8_tools.plan.followed_step import FollowedStep, LongLoop, Moment, Part, StepBytes
from torch_fp8_tools.plan.kernel_functions import followed_once
from torch_fp8_tools.plan.layouts import text_of
from torch_fp8_tools.plan.models import (
    fake_ranks,
    grouped_in_bf16,
    leave_stage,
    make_model,
    prepare,
    shard,
    stages,
)
from torch_fp8_tools.plan.setup import BF16, Setup


def standing_bytes(setup: Setup, level: str) -> MemoryReport:
    """Count weights, gradients and states on the fullest GPU, exactly.

    Args:
        setup: the planned run.
        level: one of `torch_fp8_tools.plan.setup.LEVELS`.
    """
    reports = []
    for stage, layers in stages(setup):
        model = make_model(setup, level, layers)
        leave_stage(model, stage)
        with fake_ranks(setup.fsdp) as mesh:
            optimizers = prepare(model, setup, level, mesh)
            reports.append(expected_memory(model, optimizers, summed=setup.accumulate > 1))
    return max(reports, key=lambda report: report.total)


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


_MOST_FAKE_RANKS = 64
"""The maximum number of ranks for counting a step. The bytes of a larger ring differ by 1/64 at
most, and are scaled.
"""
SHORT = 16
"""The tokens by which the sequences differ from which a long one is extrapolated. FP8 pads to as
many.
"""
MOST_OPERATORS = 20_000
"""The maximum number of operators of a layer's forward or backward."""


def step_bytes(setup: Setup, level: str) -> StepBytes:
    """Count the bytes that a model's step holds and sends beyond the persistent ones.

    If a layer loops over tokens in Python, the bytes are extrapolated from short sequences. If a
    model of few layers cannot run, because other parts are made for the number of layers, all run.

    Raises:
        ValueError: the model cannot run on tensors without memory.
    """
    places, sharded = stages(setup)[0][1], setup.fsdp > 1
    few, twins = setup.layers.shortest(places, sharded=sharded)
    if not setup.layers.loops:
        try:
            return run_step(setup, level, few).with_layers(twins)
        except LongLoop:
            setup.layers.loops = True
        except ValueError:
            if len(few) == len(places):
                raise
            setup.layers.separate = False
            return step_bytes(setup, level)
    few, twins = setup.layers.shortest(places, sharded=sharded, firsts=False)
    lengths = [setup.sequence % SHORT + count * SHORT for count in (1, 2, 3)]
    steps = [run_step(setup, level, few, sequence=length) for length in lengths]
    if steps[0].calls == steps[1].calls:  # it loops within or over longer chunks
        return run_step(setup, level, few, sequence=setup.sequence).with_layers(twins)
    extrapolated = steps[0]
    extrapolated.parts = _extrapolate([step.parts for step in steps], setup.sequence // SHORT)
    return dataclasses.replace(extrapolated.with_layers(twins), lengths=tuple(lengths))


def _extrapolate(parts: Sequence[Sequence[Part]], count: int) -> list[Part]:
    """Continue the parts of steps of 1, 2 and 3 lengths to `count` lengths, as polynomials.

    Masks and scores of attention grow with the square of the sequence, all else with the sequence.
    The moment that is highest at a short length need not be that at a long one, so a peak is the
    highest continued moment. Loops outside of `followed_once` have other moments at each length,
    and there the peaks themselves are continued.
    """

    def newton(first: int, second: int, third: int) -> int:
        bend = third - 2 * second + first
        return first + (count - 1) * (second - first) + (count - 1) * (count - 2) // 2 * bend

    def moments(*lists: list[Moment]) -> list[Moment]:
        pairs = (zip(*moment, strict=True) for moment in zip(*lists, strict=True))
        return [(newton(*total), newton(*saved)) for total, saved in pairs]

    continued = []
    for each in zip(*parts, strict=True):
        first, *values = zip(*(vars(part).values() for part in each), strict=True)
        alike = len({*map(len, first)}) == 1
        lists = first if alike else [[part.peak] for part in each]
        continued.append(Part(moments(*lists), *(newton(*value) for value in values)))
    return continued


def run_step(
    setup: Setup, level: str, layers: Sequence[int], *, sequence: int | None = None
) -> FollowedStep:
    """Run a step of a model with only these layers on fake tensors.

    Args:
        setup, level: see `step_bytes`.
        layers: the layers.
        sequence: the tokens of a sequence, or None for those of the setup.
    Raises:
        LongLoop: a layer calls more than MOST_OPERATORS operators; only if `sequence` is None.
        ValueError: the model cannot run on tensors without memory.
    """
    try:
        return _run_step(setup, level, layers, sequence)
    except (LongLoop, ValueError):
        raise
    except Exception as error:
        raise ValueError(
            f"no step of {type(setup.config).__name__} can be counted, because its model fails on "
            f"tensors without memory: {type(error).__name__}: {error}. Complete the configuration, "
            "use a shorter sequence, or plan a model of the same sizes whose forward reads no "
            "values"
        ) from error


def _run_step(
    setup: Setup, level: str, layers: Sequence[int], sequence: int | None
) -> FollowedStep:
    ranks = min(setup.fsdp, _MOST_FAKE_RANKS)
    model = make_model(setup, level, layers)
    prepare(model, setup, level, None)  # makes weights BF16 that training splits: under
    if ranks > 1 and level not in (BF16, "O1"):  # FSDP2 all that are trained
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    with warnings.catch_warnings(), fake_ranks(ranks) as mesh:
        warnings.simplefilter("ignore")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            if hasattr(model, "tie_weights"):
                model.tie_weights()
            if mesh is not None:
                shard(model, mesh)
                if level != BF16:
                    connect_fsdp(model, setup.fp8_config(level))
            step = FollowedStep(model, math.inf if sequence else MOST_OPERATORS)
            with step, followed_once(step, model), grouped_in_bf16(), torch.enable_grad():
                tokens = torch.zeros(
                    (setup.micro_batch, sequence or setup.sequence), dtype=torch.long
                )
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                    step.mark()
                    living = step.living()
                step.release(living)
                loss.backward()
                step.mark()
    step.ring = (setup.fsdp - 1) / setup.fsdp
    return step
