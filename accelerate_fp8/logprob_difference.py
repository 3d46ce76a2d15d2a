"""The difference between log-probabilities of a rollout and of training, and a warning about it.

TRL requests sampled log-probabilities only from vLLM. `SampledLogprobs` takes them from the logits
that ``generate`` passes to its logits processors: it keeps those of a step until the next step
shows the token that was sampled from them. The cost per token is one log-softmax over the
vocabulary and the memory of one position's logits.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Logprobs = list[list[float]]
"""For each sequence a list with the log-probability of each of its tokens."""


class SampledLogprobs:
    """A logits processor that records the log-probabilities of one rollout, and changes none.

    Args:
        temperature: the divisor of logits before a token is sampled.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._ids: Tensor | None = None
        self._last = torch.empty(0, 0, dtype=torch.float32, device="cpu")
        self._columns: list[Tensor] = []

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Record what `model` generates in this context.

        Args:
            model: a transformers model, possibly inside PEFT wrappers.
        """
        base = getattr(model, "get_base_model", None)
        inner = base() if callable(base) else model
        vars(inner)["generate"] = functools.partial(inner.generate, logits_processor=[self])
        try:
            yield
        finally:
            del vars(inner)["generate"]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record the tokens (B, T) so far, and the logits (B, V) of the next one."""
        shape = () if self._ids is None else (len(self._ids), self._ids.shape[1] + 1)
        if input_ids.shape == shape:
            self._columns.append(self._of(input_ids[:, -1]))
        else:  # another ``generate`` begins
            self._columns = []
        self._ids, self._last = input_ids, (scores / self._temperature).log_softmax(-1)
        return scores

    def _of(self, tokens: Tensor) -> Tensor:
        return self._last.gather(-1, tokens[:, None]).squeeze(-1)

    def of(self, completions: list[list[int]]) -> Logprobs | None:
        """Return the log-probabilities of these completions, or None if they were not recorded.

        Args:
            completions: the tokens of each sequence, as the rollout returned them.
        """
        recorded = len(self._columns)
        if self._ids is None or len(self._ids) != len(completions):
            return None
        sampled = self._ids[:, self._ids.shape[1] - recorded :].tolist()
        pairs = list(zip(sampled, completions, strict=True))
        if any(row[: len(ids)] != ids[:recorded] or len(ids) > recorded + 1 for row, ids in pairs):
            return None
        last = self._ids.new_tensor([ids[-1] if ids else 0 for ids in completions])
        rows = torch.stack([*self._columns, self._of(last)], 1).tolist()
        return [row[: len(ids)] for row, ids in zip(rows, completions, strict=True)]


BOUND = 1.03
"""The multiplicative error above which runs have been seen to diverge (NeMo-RL's gate is 1.03 to
1.05).
"""
BATCH_BOUND = 1.01
"""The bound for recipe tensorwise, whose scales depend on the rest of a batch; scales for each
token stay below it.
"""
_PER_TOKEN = ("rowwise", "blockwise", "mxfp8")


class LogprobDifference:
    """Sums of differences since the last line of the log, kept on the device."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    @torch.no_grad()
    def add(self, sampled: Tensor, scored: Tensor, mask: Tensor) -> None:
        """Add the differences of one batch.

        Args:
            sampled, scored: (B, T) log-probabilities, NaN where unknown.
            mask: (B, T) whether a token was sampled.
        """
        delta = (sampled - scored).float().abs()
        real = mask.bool() & delta.isfinite()
        difference = delta.where(real, 0.0).sum(dtype=torch.float64)
        sums = torch.stack([difference, real.sum().double()])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, accelerator: Any) -> float | None:
        """Return the mean per token over all ranks since the last call, or None without tokens.

        All ranks must call it.

        Args:
            accelerator: the ranks' Accelerator.
        """
        own, self._sums = self._sums, None
        if own is None:
            own = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        sums = accelerator.gather(own.float().view(1, -1)).double().sum(0)
        total, tokens = sums.tolist()
        return total / tokens if tokens else None


def multiplicative_error(difference: float) -> float:
    """Return exp(difference)."""
    return math.exp(min(difference, 700.0))


def warning_of(difference: float, recipes: list[str], use_vllm: bool) -> str:
    """Return a warning about a large difference, or an empty string below the bound.

    Args:
        difference: the result of `LogprobDifference.take`.
        recipes: the recipes of the layers.
        use_vllm: whether an engine samples.
    """
    error = multiplicative_error(difference)
    bound = BATCH_BOUND if "tensorwise" in recipes else BOUND
    if not error > bound:
        return ""
    coarse = [recipe for recipe in recipes if recipe not in _PER_TOKEN]
    why = "the engine that generates them does not use the weights and scales of training"
    if not use_vllm:
        why = "they run in a different precision or mode from training"
    if coarse:
        why = (
            f"recipe {coarse[0]!r} has one scale per batch, so each token depends on the rest of "
            "the batch. Use a recipe with scales per token: recipe='rowwise' or 'blockwise'"
        )
    return (
        f"FP8: rollouts differ from training by {difference:.4f} in the log-probability of a "
        f"token, fp8/logprob_multiplicative_error={error:.3f}, above {bound}: {why}"
    )
