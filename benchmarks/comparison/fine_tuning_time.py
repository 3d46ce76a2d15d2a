"""Estimate the time of fine-tuning on this CPU from a few steps in BF16 and in FP8."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8
from torch_fp8_tools.compare import bf16_products
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Work:
    """The counts of a fine-tuning run.

    Attributes:
        micro_batches: forward and backward passes.
        updates: optimizer steps.
        evaluations: forward passes without gradients.
    """

    micro_batches: int
    updates: int
    evaluations: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of one micro-batch, one optimizer step and one evaluated micro-batch."""

    micro_batch: float
    update: float
    evaluation: float

    def of(self, work: Work) -> float:
        """Return the seconds of a run."""
        return (
            work.micro_batches * self.micro_batch
            + work.updates * self.update
            + work.evaluations * self.evaluation
        )


def step_times(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[StepTime, StepTime]:
    """Measure steps in BF16 autocast and in FP8; the model is trained and converted.

    Slow BF16 products are computed in float32, as ``--fast-cpu`` does in the trials.

    Args:
        model: float32, on the CPU.
        batch: arguments of the model: input_ids and labels of a micro-batch, and others.
    Returns:
        the seconds in BF16 and in FP8.
    """
    is_slow = bf16_products.slowness() >= bf16_products.SLOW
    if is_slow:
        bf16_products.compute_in_float32()
    try:
        return _measured(model, batch, fp8=False), _measured(model, batch, fp8=True)
    finally:
        if is_slow:
            bf16_products.restore()


def _measured(model: PreTrainedModel, batch: dict[str, Tensor], fp8: bool) -> StepTime:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    if fp8:
        config = FP8Config.from_env() or FP8Config()
        convert_to_float8(model, config)
        convert_optimizer(optimizer, config, model=model)
    model.train()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch, use_cache=False).loss

    def micro_batch() -> None:
        loss().backward()

    def evaluate() -> None:
        with torch.no_grad():
            loss()

    micro_batch()  # the first one is slower
    time_of_micro_batch = min(_seconds(micro_batch) for _ in range(2))
    optimizer.step()
    time_of_update = _seconds(optimizer.step)
    optimizer.zero_grad()
    return StepTime(time_of_micro_batch, time_of_update, _seconds(evaluate))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
