"""The difference between rollout and training log-probabilities, and its consequences.

TRL's sequence-level correction multiplies a sequence's gradient by the importance ratio, whose mean
is 1, and drops the sequence if the ratio is above a cap. The mean of the ratios, with 0 for dropped
sequences, is therefore the share of the gradients' weight that remains.

`SampledLogprobs`: the log-probabilities of tokens that a policy samples with ``generate``.

TRL requests them only from vLLM. This module takes them from the logits of the forwards that
``generate`` runs anyway, without another forward: it keeps the logits of each forward's last
position until the next forward receives the token that was sampled from them as its input. The cost
per token is one log-sum-exp over the vocabulary and the memory of one position's logits.

Continuous batching (``generate_batch``) has an option in transformers to return them.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
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
        self._batching = False
        self._requests: Logprobs | None = None

    @contextlib.contextmanager
    def watching(self, model: Any, batching: Any) -> Iterator[None]:
        """Record what `model` generates in this context.

        Args:
            model: a transformers model, possibly inside PEFT wrappers.
            batching: the trainer's configuration of ``generate_batch``, or None if it has none.
        """
        asks = getattr(batching, "return_logprobs", None)
        original = getattr(model, "generate_batch", None)

        def generate_batch(*args: Any, **kwargs: Any) -> Any:
            assert original is not None
            self._batching = True
            outputs = original(*args, **kwargs)
            logprobs = [getattr(output, "logprobs", None) or [] for output in outputs.values()]
            self._requests = logprobs if asks is not None else None
            return outputs

        base = getattr(model, "get_base_model", None)
        inner: nn.Module = base() if callable(base) else model
        handle = inner.register_forward_hook(self._note, with_kwargs=True)
        if original is not None:
            vars(model)["generate_batch"] = generate_batch
        if asks is not None:
            batching.return_logprobs = True
        try:
            yield
        finally:
            handle.remove()
            vars(model).pop("generate_batch", None)
            if asks is not None:
                batching.return_logprobs = asks

    @torch.no_grad()
    def _note(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        del module, args
        ids, logits = kwargs.get("input_ids"), getattr(output, "logits", None)
        if self._batching or ids is None or logits is None:
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
        """Return the log-probabilities of these completions; None if they cannot be determined.

        Forwards before the first sampled token (chunks of a prompt) and after the last one (ranks
        that wait for others) are recognized by their input tokens.

        Args:
            completions: the tokens of each sequence, as the rollout returned them.
        """
        if self._batching:
            requests = self._requests or []
            return requests if [*map(len, requests)] == [*map(len, completions)] else None
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
LEAST_KEPT = 0.9
"""The share of the gradients' weight below which a warning reports dropped sequences."""
_PER_TOKEN = ("rowwise", "blockwise", "mxfp8")


@dataclass(frozen=True)
class Measured:
    """The measurements between two lines of the log, over all ranks.

    Attributes:
        mean: the mean of ``|log p - log q|`` per token.
        kept: the mean importance ratio of sequences, with 0 for those that were dropped; None if
            there are no ratios of sequences.
    """

    mean: float
    kept: float | None

    @property
    def error(self) -> float:
        """The multiplicative error, exp(mean)."""
        return math.exp(min(self.mean, 700.0))


class LogprobDifference:
    """Sums of differences since the last line of the log, kept on the device."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    @torch.no_grad()
    def add(self, sampled: Tensor, scored: Tensor, mask: Tensor, ratio: Tensor | None) -> None:
        """Add the differences of one batch.

        Args:
            sampled, scored: (B, T) log-probabilities; NaN: unknown.
            mask: (B, T) whether a token was sampled.
            ratio: importance ratios, (B, 1) of sequences or (B, T) of tokens, or None.
        """
        delta = (sampled - scored).float().abs()
        real = mask.bool() & delta.isfinite()
        share = rows = torch.zeros((), device=delta.device, dtype=torch.float64)
        if ratio is not None and ratio.shape[-1] == 1:  # of sequences
            is_row = mask.bool().any(-1)
            share, rows = ratio.reshape(-1).double().where(is_row, 0.0).sum(), is_row.sum().double()
        difference = delta.where(real, 0.0).sum(dtype=torch.float64)
        sums = torch.stack([difference, real.sum().double(), share, rows])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, accelerator: Any) -> Measured | None:
        """Return all ranks' sums since the last call, or None; all ranks must call it.

        Args:
            accelerator: the ranks' Accelerator.
        """
        own = self._sums
        self._sums = None
        if own is None:
            own = torch.zeros(4, dtype=torch.float64, device=accelerator.device)
        sums = accelerator.gather(own.float().view(1, -1)).double().sum(0)
        total, tokens, share, rows = sums.tolist()
        return Measured(total / tokens, share / rows if rows else None) if tokens else None


def warnings_of(measured: Measured, recipes: list[str], trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of warnings.

    Args:
        measured: the result of `LogprobDifference.take`.
        recipes: the recipes of the layers.
        trainer: the TRL trainer, whose correction is read.
    """
    finding = (
        f"FP8: rollouts differ from training by {measured.mean:.4f} in the log-probability of a "
        f"token, fp8/logprob_multiplicative_error={measured.error:.3f}"
    )
    coarse = [recipe for recipe in recipes if recipe not in _PER_TOKEN]
    bound = BATCH_BOUND if "tensorwise" in recipes else BOUND
    if measured.error > bound:
        why = "the engine that generates them does not use the weights and scales of training"
        if not trainer.use_vllm:
            why = "they run in a different precision or mode from training"
        if coarse:
            why = (
                f"recipe {coarse[0]!r} has one scale per batch, so each token depends on the rest "
                "of the batch. Use a recipe with scales per token: recipe='rowwise' or 'blockwise'"
            )
        yield "bound", f"{finding}, above {bound}: {why}"
    mode = getattr(trainer, "vllm_importance_sampling_mode", None)
    corrects = trainer.use_vllm and getattr(trainer, "vllm_importance_sampling_correction", False)
    if not corrects or mode != "sequence_mask" or measured.kept is None:
        return
    if measured.kept < LEAST_KEPT:
        yield (
            "correction",
            f"{finding}. vllm_importance_sampling_mode='sequence_mask' drops rollouts whose ratio "
            f"is above its cap, and {measured.kept:.0%} of the gradients' weight is kept. Correct "
            "each token separately (vllm_importance_sampling_mode='token_truncate', "
            "vllm_importance_sampling_clip_max=2.0), or reduce the difference: use one recipe with "
            "scales per token in training and in the engine",
        )
