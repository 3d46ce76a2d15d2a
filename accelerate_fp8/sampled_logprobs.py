"""`SampledLogprobs`: the log-probabilities of tokens that a policy samples with ``generate``.

TRL requests them only from vLLM. This module takes them from the logits of the forwards that
``generate`` runs anyway, without another forward: it keeps the logits of each forward's last
position until the next forward receives the token that was sampled from them as its input. The cost
per token is one log-sum-exp over the vocabulary and the memory of one position's logits.

Continuous batching (``generate_batch``) has an option in transformers to return them.
"""

import contextlib
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
        self._batching = False
        self._requests: Logprobs | None = None

    @contextlib.contextmanager
    def watching(self, model: Any, batching: Any) -> Iterator[None]:
        """Record what `model` generates in this context.

        Args:
            model: a transformers model, possibly inside PEFT wrappers.
            batching: the trainer's configuration of ``generate_batch``; None: it has none.
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
