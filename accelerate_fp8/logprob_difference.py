"""The difference between log-probabilities of a rollout and of training, and a warning about it.

TRL requests sampled log-probabilities only from vLLM. `SampledLogprobs` takes them from the logits
of the forwards that ``generate`` runs anyway: it keeps the logits of each forward's last position
until the next forward receives the token that was sampled from them as its input. The cost per
token is one log-sum-exp over the vocabulary and the memory of one position's logits.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

Logprobs = list[list[float]]
"""For each sequence a list with the log-probability of each of its tokens."""


class SampledLogprobs:
    """Records the log-probabilities of one rollout.

    Args:
        temperature: the divisor of logits before a token is sampled.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._last: Tensor | None = None
        self._chosen: list[Tensor] = []
        self._columns: list[Tensor] = []

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Record what `model` generates in this context.

        Args:
            model: a transformers model, possibly inside PEFT wrappers.
        """
        base = getattr(model, "get_base_model", None)
        inner: nn.Module = base() if callable(base) else model
        handle = inner.register_forward_hook(self._note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def _note(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        ids, logits = kwargs.get("input_ids"), getattr(output, "logits", None)
        if ids is None or logits is None:
            self._last = None
            return
        if self._last is not None and self._last.shape[0] == ids.shape[0]:
            self._chosen.append(ids[:, -1])
            self._columns.append(self._of(ids[:, -1]))
        self._last = logits[:, -1].detach()

    def _of(self, tokens: Tensor) -> Tensor:
        assert self._last is not None
        logits = self._last.float() / self._temperature
        chosen = logits.gather(-1, tokens[:, None]).squeeze(-1)
        return chosen - logits.logsumexp(-1)

    def of(self, completions: list[list[int]]) -> Logprobs | None:
        """Return the log-probabilities of these completions, or None if they cannot be determined.

        Forwards before the first sampled token (chunks of a prompt) and after the last one (ranks
        that wait for others) are recognized by their input tokens.

        Args:
            completions: the tokens of each sequence, as the rollout returned them.
        """
        steps = max(map(len, completions), default=0)
        if not steps or self._last is None or self._last.shape[0] != len(completions):
            return None
        padded = torch.zeros(len(completions), steps, dtype=torch.long)
        real = torch.zeros(len(completions), steps, dtype=torch.bool)
        for row, ids in enumerate(completions):
            padded[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            real[row, : len(ids)] = True
        columns = [*self._columns, self._of(padded[:, -1].to(self._last.device))]
        values = torch.stack(columns, 1).cpu()
        given = torch.stack([*self._chosen, padded[:, -1].to(self._last.device)], 1).cpu()
        for first in range(given.shape[1] - steps, -1, -1):
            if torch.equal(given[:, first : first + steps] * real, padded):
                rows = values[:, first : first + steps].tolist()
                return [row[: len(ids)] for row, ids in zip(rows, completions, strict=True)]
        return None


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
        own = self._sums
        self._sums = None
        if own is None:
            own = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        sums = accelerator.gather(own.float().view(1, -1)).double().sum(0)
        total, tokens = sums.tolist()
        return total / tokens if tokens else None


def multiplicative_error(difference: float) -> float:
    """Return exp(difference)."""
    return math.exp(min(difference, 700.0))


def warning_of(difference: float, recipes: list[str], use_vllm: bool) -> str:
    """Return a warning about a large difference; empty if it is below the bound.

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
