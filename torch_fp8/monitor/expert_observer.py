"""Observation of fused experts for the monitor: `ExpertObserver` and `TokenCounter`.

In a measured step the grouped GEMMs show their operands, as layers do
(`torch_fp8.monitor.layer_observer`). The router's choices are counted in every step without waiting
for the device, so an expert without a token had none since the last measured step.
"""

from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_fp8.monitor.expert_statistics import (
    TOKENS,
    WORST,
    rows_statistics,
    token_statistics,
    weight_statistics,
)
from torch_fp8.monitor.layer_observer import (
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    Observation,
    apart,
    matrix,
)
from torch_fp8.monitor.statistics import UPDATE
from torch_fp8.nn.class_swap import unwrapped_name
from torch_fp8.nn.experts import Float8Experts
from torch_fp8.ops.one_rank import in_several_ranks
from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.quantization.wording import first_of
from torch_fp8.tensor.base import QuantizableTensor
from torch_fp8.tensor.frozen_weight import Float8FrozenWeight
from torch_fp8.tensor.split_weight import stored

EXPERTS = "experts"
Source: TypeAlias = Tensor | Callable[[], Tensor]
"""The source of a payload, or a function that computes it."""
_NAMED = 8
"""The maximum number of experts in an event."""


class ExpertWeight(NamedTuple):
    """A fused weight with its qualified name, for statistics of its update."""

    module: Float8Experts
    name: str

    @property
    def weight(self) -> Any:
        """The current Parameter."""
        return self.module._parameters[self.name]


class ExpertObserver:
    """Observes the operands of one fused weight's GEMMs.

    Args:
        step: the observation that it belongs to.
        name: the weight's qualified name.
    """

    def __init__(self, step: Observation, name: str) -> None:
        self.step, self.name = step, name

    def _look_at_rows(
        self, kind: str, x: Source, payload: QuantizedTensor, offs: Tensor, token: Tensor | None
    ) -> None:
        self._look(kind, lambda: rows_statistics(_source(x), payload, offs, token))

    input = partialmethod(_look_at_rows, INPUT)
    """Observe the rows that forward multiplies.

    Args:
        x: the source, or a function that computes it; see `rows_statistics`.
        payload: the source in FP8.
        offs, token: the order of rows.
    """
    grad_output = partialmethod(_look_at_rows, GRAD_OUTPUT)
    """Observe the rows that backward multiplies; see `input`."""

    def weight(self, weight: Tensor, payload: QuantizedTensor, flip: bool) -> None:
        """Observe the weights of all experts, or of those that this rank casts.

        Args:
            weight: the source (E, R, C), as it is stored.
            payload: the source in FP8, or with `flip` its transpose.
            flip: whether the payload is transposed.
        """
        if not isinstance(weight, QuantizableTensor | Float8FrozenWeight):
            values = stored(weight)
            values = values.transpose(1, 2) if flip else values  # (E, R, C) -> (E, C, R)
            self._look(WEIGHT, lambda: weight_statistics(values, payload))

    def _look(self, kind: str, statistics: Callable[[], Tensor]) -> None:
        self.step.look(f"{self.name}/{kind}", statistics)


class ExpertObservers(dict[str, ExpertObserver]):
    """The observers of a module's weights by name; dropped when the module is copied or pickled."""

    def __reduce__(self) -> Any:
        return type(None), ()


class TokenCounter:
    """Counts the tokens of each expert of one module; dropped when the module is copied or pickled.

    Args:
        name: the module's qualified name.
        module: the module.
    """

    def __init__(self, name: str, module: Float8Experts) -> None:
        self.name, self.module = name, module
        count = getattr(module, "num_experts", None)
        self.size = count if isinstance(count, int) else _num_held(module)
        self.counts: Tensor | None = None

    def names(self) -> list[tuple[str, str]]:
        """Return (name, qualified name) of each fused weight."""
        return [(key, f"{self.name}.{key}".lstrip(".")) for key in self.module.fp8_weight_names]

    def add(self, top_k_index: Tensor) -> None:
        """Count a router's choice; values of E and above belong to no expert of this rank."""
        with apart():
            index = top_k_index.detach().reshape(-1).long().clamp(max=self.size)
            counts = index.new_zeros(self.size + 1)
            self._add(counts.scatter_add_(0, index, torch.ones_like(index)))

    def add_rows(self, x: Tensor) -> None:
        """Count the tokens that are not zero.

        Args:
            x: the tokens (E, T, H) of each expert.
        """
        with apart():
            self._add(nn.functional.pad(x.detach().any(-1).sum(1), (0, 1)))

    def _add(self, counts: Tensor) -> None:
        self.counts = counts if self.counts is None else self.counts + counts

    def taken(self, device: torch.device) -> Tensor:
        """Return the counts (E,) so far, and reset them."""
        counts, self.counts = self.counts, None
        if counts is None:
            return torch.zeros(self.size, dtype=torch.int64, device=device)
        return counts[: self.size].to(device)

    def __reduce__(self) -> Any:
        return type(None), ()


class ExpertModules:
    """The modules of fused experts of a monitored model.

    Args:
        model: the converted model, not wrapped.
    Attributes:
        weights: (qualified name, weight) of each fused weight.
    """

    def __init__(self, model: nn.Module) -> None:
        self._counters: list[TokenCounter] = []
        self.weights: list[tuple[str, ExpertWeight]] = []
        for name, module in model.named_modules():
            if isinstance(module, Float8Experts):
                module.fp8.tokens = counter = TokenCounter(unwrapped_name(name), module)
                self._counters.append(counter)
                self.weights += [(n, ExpertWeight(module, key)) for key, n in counter.names()]
        self.counts: list[Tensor] = []
        """The tokens of each module's experts in the last measured step, over all ranks."""

    def kinds(self) -> dict[str, tuple[str, ...]]:
        """Return the measured kinds; see `torch_fp8.monitor.parameters.kinds_of`."""
        kinds: dict[str, tuple[str, ...]] = {}
        for name, of_weight in self.weights:
            kinds[f"{name}/{INPUT}"] = kinds[f"{name}/{GRAD_OUTPUT}"] = WORST
            if not isinstance(of_weight.weight, Float8FrozenWeight):
                kinds[f"{name}/{WEIGHT}"] = WORST
            if of_weight.weight.requires_grad:
                kinds[f"{name}/update"] = UPDATE
        return kinds | {f"{counter.name}/{EXPERTS}": TOKENS for counter in self._counters}

    def observe(self, step: Observation | None) -> None:
        """Show the GEMMs' operands to an observation from now on; None stops it."""
        for counter in self._counters:
            if isinstance(counter.module, Float8Experts):  # it may have been reverted meanwhile
                counter.module.fp8.observers = None
                if step is not None:
                    named = {key: ExpertObserver(step, name) for key, name in counter.names()}
                    counter.module.fp8.observers = ExpertObservers(named)

    def remove(self) -> None:
        """Stop counting."""
        for counter in self._counters:
            if isinstance(counter.module, Float8Experts):
                counter.module.fp8.tokens = None

    def look_at_tokens(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield the distribution of tokens since the last call; a collective of all ranks.

        Under expert parallelism ranks have different experts, whose counts are not added up. If
        compiled steps have counted nothing, nothing is yielded.
        """
        counted = [counter.counts is not None for counter in self._counters]
        taken = [counter.taken(device) for counter in self._counters]
        if taken and in_several_ranks():
            joined = torch.cat(taken)
            dist.all_reduce(joined)
            pairs = zip(self._counters, joined.split([len(t) for t in taken]), taken, strict=True)
            taken = [total if _num_held(c.module) == c.size else own for c, total, own in pairs]
        self.counts = taken
        for counter, counts, has_counted in zip(self._counters, taken, counted, strict=True):
            if has_counted:
                yield f"{counter.name}/{EXPERTS}", token_statistics(counts)

    def empty(self) -> Iterator[tuple[str, str]]:
        """Yield (module's name, list of experts) for modules with experts without a token."""
        for counter, counts in zip(self._counters, self.counts, strict=False):
            tokens: list[int] = counts.tolist()
            none = [str(i) for i, count in enumerate(tokens) if not count]
            if none:
                yield counter.name, first_of(none, _NAMED)


def _source(x: Source) -> Tensor:
    return matrix(x if isinstance(x, Tensor) else x())


def _num_held(module: Any) -> int:
    """Return the number of experts on this rank: only a part of them under expert parallelism."""
    return len(getattr(module, module.fp8_weight_names[0]))
