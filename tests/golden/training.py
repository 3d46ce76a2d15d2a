"""A tiny Llama, its batches, and a training run that notes every loss and gradient norm exactly.

A run has 30 steps, numbered from 1, as users write them: BF16 autocast, AdamW with two groups,
clipping by the global norm, so that the norm counts in each update. Some batches have an odd number
of tokens, some steps accumulate over two micro-batches, and the loss of an evaluation is noted four
times. After step 20 a checkpoint is saved; a fresh model resumes from it and runs the rest.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models import SIZES
from torch_fp8 import Float8Linear

STEPS, SAVED_AFTER = 30, 20
ODD, ACCUMULATED = (2, 5, 11, 17, 23, 29), (7, 26)
EVALUATED = {
    10: torch.no_grad,
    15: torch.inference_mode,
    24: torch.no_grad,
    28: torch.inference_mode,
}
MAX_NORM = 0.5
"""Under what the gradients have, so that every step is clipped."""
NUM_TEXTS = 4
"""Batches repeat after as many, so that the loss falls."""
LLAMA = SIZES | {"vocab_size": 96, "hidden_size": 96, "intermediate_size": 160, "head_dim": 24}
LLAMA |= {"max_position_embeddings": 64, "tie_word_embeddings": False}


def llama(seed: int = 0) -> LlamaForCausalLM:
    """In float32; large weights (4,096 elements and more) and small ones occur among its layers."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).train()


def leave_groups(model: nn.Module) -> None:
    """Have each layer run its own backward, as when the bits were recorded.

    Groups (`torch_fp8.nn.input_group`) add up in another order; test_input_group.py has their
    values.
    """
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.fp8.group = None


def adamw(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1)


def batch(number: int, tokens: int, rank: int) -> Tensor:
    """Token ids (2, `tokens`), the same for the same arguments."""
    generator = torch.Generator().manual_seed(1 + 100 * rank + number % NUM_TEXTS)
    return torch.randint(0, LLAMA["vocab_size"], (2, 40), generator=generator)[:, :tokens]


def micro_batches(step: int, rank: int) -> list[Tensor]:
    tokens = 37 if step in ODD else 32
    numbers = (step, step + 1) if step in ACCUMULATED else (step,)
    return [batch(number, tokens, rank) for number in numbers]


class Run:
    """A model and an optimizer that are being trained; subclasses have ranks.

    Attributes:
        module: what is called.
        optimizer: that steps on its weights.
        releases: whether gradients are gone after backward: no clipping and no accumulation then.
        autocast: whether in BF16.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, releases: bool = False, autocast: bool = True
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.releases, self.autocast, self.rank = releases, autocast, 0

    def loss(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.module(input_ids=ids, labels=ids).loss

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def train(self, steps: Iterable[int]) -> dict[str, list[float]]:
        """Run steps: the losses (of each micro-batch), norms and losses of evaluations."""
        noted: dict[str, list[float]] = {"losses": [], "norms": [], "evaluations": []}
        for step in steps:
            ids = micro_batches(step, self.rank)
            ids = ids[:1] if self.releases else ids
            for i, of_micro_batch in enumerate(ids):
                with self.micro_batch(last=i == len(ids) - 1):
                    loss = self.loss(of_micro_batch)
                    (loss / len(ids)).backward()
                noted["losses"].append(loss.item())
            if not self.releases:
                norm = nn.utils.clip_grad_norm_(self.module.parameters(), MAX_NORM)
                noted["norms"].append(float(getattr(norm, "full_tensor", lambda norm=norm: norm)()))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step in EVALUATED:
                self.module.eval()
                with EVALUATED[step]():
                    noted["evaluations"].append(self.loss(batch(9, 37, self.rank)).item())
                self.module.train()
        return noted


def digests(state: Any) -> dict[str, str]:
    """SHA-256 of a nested state: of its keys, dtypes and shapes, and of these with all values."""
    layout, values = hashlib.sha256(), hashlib.sha256()
    for key, value in _leaves("", state):
        if isinstance(value, Tensor):
            value = getattr(value, "_local_tensor", value).detach()
            line = f"{key} {value.dtype} {tuple(value.shape)}\n"
            data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            line, data = f"{key} {type(value).__name__}\n", repr(value).encode()
        layout.update(line.encode())
        values.update(line.encode() + data)
    return {"layout": layout.hexdigest(), "values": values.hexdigest()}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name in sorted(value, key=str):
            yield from _leaves(f"{key}.{name}", value[name])
    elif isinstance(value, (list, tuple)):
        for i, element in enumerate(value):
            yield from _leaves(f"{key}[{i}]", element)
    else:
        yield key, value
