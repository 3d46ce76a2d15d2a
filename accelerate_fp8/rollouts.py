"""Measurement of what FP8 does to the rollouts of TRL's reinforcement learning trainers.

`accelerate_fp8._register` installs these functions. Each takes the wrapped method as its first
argument, followed by the method's arguments.

A policy gradient assumes that a token was sampled with the probability that the training forward
assigns to it. The two are computed separately: sampling runs one token after another with a cache,
or in another engine; training scores all tokens at once. ``fp8/logprob_difference`` is the mean of
``|log p - log q|`` over all tokens sampled since the last line of the log, and
``fp8/logprob_multiplicative_error`` its exponential. Both sides already exist: the sampled ones
come from the engine or from `SampledLogprobs`, and the trainer computes the others from the same
weights. No forward is added, and nothing waits for the device.
"""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelerate_fp8.logprob_difference import (
    LogprobDifference,
    Logprobs,
    SampledLogprobs,
    multiplicative_error,
    warning_of,
)
from accelerate_fp8.trainer import warn_once
from torch_fp8.nn.linear import Float8Layer
from torch_fp8.nn.rollout import rollout
from torch_fp8.optim.embedding_dtype import bf16_stream

_SAMPLED = "fp8_sampled_logprobs"
"""The key of the sampled log-probabilities among a trainer's inputs, which it shuffles and
splits.
"""


_IN_BATCHES = ("use_transformers_continuous_batching", "use_transformers_paged")
"""The options with which newer and older TRL choose ``generate_batch``."""


class RolloutState:
    """The state of one trainer's measurements.

    Attributes:
        sampled: the rollout that is being scored, or None if it was not watched, or is not
            available.
        scored: the log-probabilities that the trainer has computed in `scoring`.
        differences: the differences by mode, "train" and "eval".
    """

    def __init__(self) -> None:
        self.sampled: Logprobs | None = None
        self.scored: Tensor | None = None
        self.is_scoring = False
        self.differences = {"train": LogprobDifference(), "eval": LogprobDifference()}
        self.has_warned = False

    @contextlib.contextmanager
    def scoring(self) -> Any:
        """Record the first log-probabilities that the trainer computes in this context."""
        self.scored, self.is_scoring = None, True
        try:
            yield
        finally:
            self.is_scoring = False


def generate_single_turn(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``_generate_single_turn``: sample in training's FP8; record log-probabilities."""
    if self.use_vllm:
        return original(self, *args, **kwargs)
    state, model = _state_of(self), self.accelerator.unwrap_model(self.model_wrapped)
    watch = SampledLogprobs(float(self.temperature))
    in_batches = any(getattr(self, name, False) for name in _IN_BATCHES)
    watching = bf16_stream(model) if in_batches else watch.watching(model)
    # TRL compiles nothing, and transformers drops its graphs after each generate_batch.
    with rollout(model, keep_graphs=False), self.accelerator.autocast(), watching:
        result = original(self, *args, **kwargs)
    several = isinstance(result, tuple)
    state.sampled = watch.of(result[0] if several else result)
    if not several or result[1] is not None:
        return result
    return (result[0], state.sampled, *result[2:])


def generate_and_score_completions(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``_generate_and_score_completions``: measure, or keep the samples for `compute_loss`.

    It measures if the trainer has scored the tokens with the weights that they were sampled with.
    """
    state = _state_of(self)
    state.sampled = None
    with state.scoring():
        output = original(self, *args, **kwargs)
    sampled = output.get("sampling_per_token_logps")
    if state.sampled is not None:
        sampled = _padded(state.sampled, output["completion_ids"])
        output.pop("sampling_per_token_logps", None)  # keep the loss as it is without us
    # RLOO's "old_logps" are summed over tokens.
    scored = state.scored if "old_logps" in output else output.get("old_per_token_logps")
    if sampled is None:
        _unmeasured(
            "the sampler did not return log-probabilities"
            if self.use_vllm
            else "this generation method does not expose the logits it samples from"
        )
    elif scored is None:
        output[_SAMPLED] = sampled
    else:
        _measure(self, output, sampled, scored)
    return output


def get_per_token_logps_and_entropies(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``_get_per_token_logps_and_entropies``: record its first result."""
    logps = original(self, *args, **kwargs)
    state = _state_of(self)
    if state.is_scoring and state.scored is None:
        state.scored = (logps[0] if isinstance(logps, tuple) else logps).detach()
    return logps


def compute_loss(
    original: Any, self: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Extend ``compute_loss``: measure if the loss scores tokens of the same weights."""
    state, sampled = _state_of(self), inputs.get(_SAMPLED) if isinstance(inputs, dict) else None
    if sampled is None:
        return original(self, model, inputs, *args, **kwargs)
    with state.scoring():
        loss = original(self, model, inputs, *args, **kwargs)
    if state.scored is None:
        _unmeasured("the loss computes no log-probabilities (a fused loss)")
    else:
        _measure(self, inputs, sampled, state.scored)
    return loss


def log(original: Any, self: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Extend ``log``: add the metrics, and warn once above the bound."""
    state, mode = _state_of(self), "train" if self.model.training else "eval"
    mean = state.differences[mode].take(self.accelerator)
    if mean is not None:
        metrics = {"difference": mean, "multiplicative_error": multiplicative_error(mean)}
        for name, value in metrics.items():  # None like TRL's: loggers of JSON refuse NaN
            key = f"{'' if mode == 'train' else 'eval_'}fp8/logprob_{name}"
            logs[key] = None if math.isnan(value) else value
        layers = (m for m in self.model.modules() if isinstance(m, Float8Layer))
        recipes = sorted({layer.fp8.recipe.name for layer in layers})
        text = warning_of(mean, recipes, self.use_vllm)
        if text and not state.has_warned:
            state.has_warned = True
            warn_once(text)
    return original(self, logs, *args, **kwargs)


def say_unmeasured(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend ``log`` of a trainer without the required methods: warn that nothing is measured."""
    _unmeasured("the methods of this version of TRL are not supported")
    return original(self, *args, **kwargs)


def _measure(trainer: Any, inputs: dict[str, Any], sampled: Tensor, scored: Tensor) -> None:
    mode = "train" if trainer.model.training else "eval"
    _state_of(trainer).differences[mode].add(sampled, scored, sampled_mask(inputs))


def sampled_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Return the mask (B, T) of a batch's tokens that the policy sampled, not a tool."""
    mask, of_tools = inputs["completion_mask"], inputs.get("tool_mask")
    return mask if of_tools is None else mask * of_tools


def _state_of(trainer: Any) -> RolloutState:
    return vars(trainer).setdefault("_fp8_rollouts", RolloutState())


def _padded(rows: Logprobs, like: Tensor) -> Tensor:
    """Return rows as a tensor of the shape of `like`, with NaN for missing values."""
    padded = torch.full(like.shape, float("nan"), dtype=torch.float32)
    for i, row in enumerate(rows[: len(padded)]):
        padded[i, : len(row)] = torch.tensor(row[: padded.shape[1]], dtype=torch.float32)
    return padded.to(like.device)


def _unmeasured(reason: str) -> None:
    warn_once(f"FP8: fp8/logprob_difference is not measured: {reason}")
