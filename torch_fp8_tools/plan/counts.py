"""The bytes of a run, counted by the training code on tensors without memory.

Bytes that persist between steps (weights, gradients, states) are those of the whole model. It is
converted, sharded by FSDP2 over the run's number of ranks, of which this process is one, and
counted by `torch_fp8.conversion.memory`.

Bytes that exist only within a step are counted in one step of a model with a few layers
(`torch_fp8_tools.plan.followed_step`). The step of the whole model is put together from its parts:
each layer has a twin among the few (`torch_fp8_tools.plan.layers`).
"""

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_fp8.conversion.memory import MemoryReport, expected_memory
from torch_fp8.distributed.fsdp.connect import connect_fsdp
from torch_fp8_tools.plan.followed_step import FollowedStep, StepBytes, TooManyOperators
from torch_fp8_tools.plan.layouts import text_of
from torch_fp8_tools.plan.models import (
    fake_ranks,
    grouped_in_bf16,
    make_model,
    prepare,
    shard,
    unpadded_rows,
)
from torch_fp8_tools.plan.setup import BF16, Setup


def standing_bytes(setup: Setup, level: str) -> MemoryReport:
    """Count weights, gradients and states on the fullest GPU, exactly.

    Args:
        setup: the planned run.
        level: one of `torch_fp8_tools.plan.setup.LEVELS`.
    """
    model = make_model(setup, level, all_layers(setup))
    with fake_ranks(setup.fsdp) as mesh:
        optimizers = prepare(model, setup, level, mesh)
        return expected_memory(model, optimizers, summed=setup.accumulate > 1)


def all_layers(setup: Setup) -> range:
    """Return the numbers of the model's layers."""
    return range(text_of(setup.config).num_hidden_layers)


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
    layers = len(all_layers(setup))
    activations = 2 * setup.tokens * text_of(setup.config).hidden_size * setup.accumulate
    ring = 2 * (setup.tensor - 1) / setup.tensor
    return fsdp + replicas + 4 * layers * ring * activations


_MOST_FAKE_RANKS = 64
"""The maximum number of ranks for counting a step. The bytes of a larger ring differ by 1/64 at
most, and are scaled.
"""


def step_bytes(setup: Setup, level: str) -> StepBytes:
    """Count the bytes that a model's step holds and sends beyond the persistent ones.

    If a model of few layers cannot run, because other parts are made for the number of layers, all
    run.

    Raises:
        ValueError: the model cannot run on tensors without memory.
    """
    places = all_layers(setup)
    few, twins = setup.layers.shortest(places, sharded=setup.fsdp > 1)
    try:
        return run_step(setup, level, few).with_layers(twins)
    except ValueError as error:
        if len(few) == len(places) or isinstance(error, TooManyOperators):
            raise
        setup.layers.separate = False
        return step_bytes(setup, level)


def run_step(setup: Setup, level: str, layers: Sequence[int]) -> FollowedStep:
    """Run a step of a model with only these layers on fake tensors.

    Args:
        setup, level: see `step_bytes`.
        layers: the layers.
    Raises:
        ValueError: the model cannot run on tensors without memory.
    """
    try:
        ranks = min(setup.fsdp, _MOST_FAKE_RANKS)
        model = make_model(setup, level, layers)
        prepare(model, setup, level, None)  # makes weights BF16 that training splits: under
        if ranks > 1 and level not in (BF16, "O1"):  # FSDP2 all that are trained
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
        with fake_ranks(ranks) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            if hasattr(model, "tie_weights"):
                model.tie_weights()
            if mesh is not None:
                shard(model, mesh)
                if level != BF16:
                    connect_fsdp(model, setup.fp8_config(level))
            step = FollowedStep(model)
            with step, grouped_in_bf16(), unpadded_rows(), torch.enable_grad():
                tokens = torch.zeros(setup.micro_batch, setup.sequence, dtype=torch.long)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                    step.mark()
                    living = step.living()
                step.release(living)
                loss.backward()
                step.mark()
        step.ring = (setup.fsdp - 1) / setup.fsdp
        return step
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"no step of {type(setup.config).__name__} can be counted, because its model fails on "
            f"tensors without memory: {type(error).__name__}: {error}. Complete the configuration, "
            "use a shorter sequence, or plan a model of the same sizes whose forward reads no "
            "values"
        ) from error
