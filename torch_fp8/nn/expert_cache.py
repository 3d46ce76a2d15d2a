"""`StackedCache`: FP8 payloads of one fused expert weight, for as long as they are valid.

The rule is that of layers (`torch_fp8.tensor.payload_cache`): a weight in two halves sees each of
its writes, and within a rollout nobody writes to any weight. From one optimizer step to the next
``cache_weights=True`` keeps the payload that forward multiplies, and ``"both"`` also that of
backward, which has other scales and would be cast in each micro-batch. A forward without gradients
keeps its payload until training goes on. What is kept are the bytes that a cast makes, so that
results do not change. Experts in a graph of torch.compile or of CUDA keep nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.tensor.halves import VERSIONS
from torch_fp8.tensor.payload_cache import is_capturing
from torch_fp8.tensor.split_weight import SplitWeight


class StackedCache:
    """What is kept of one weight (E, R, C). Copies and pickles start empty.

    Args:
        keeps_evaluation: whether a payload is kept from one forward without gradients to the next.

    Attributes:
        between_steps: what is kept from one optimizer step to the next: nothing (None), forward's
            payload (True), that of backward as well (``"both"``).
    """

    def __init__(self, keeps_evaluation: bool) -> None:
        self.keeps_evaluation = keeps_evaluation
        self.between_steps: bool | str | None = None
        self._scope: int | None = None
        self._scoped_weight: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Free all payloads."""
        self._payloads: dict[bool, QuantizedTensor] = {}
        self._version: int | None = None

    def forget_evaluation(self) -> None:
        """Free what is kept for forwards without gradients alone."""
        if not self.between_steps:
            self.forget()

    def begin_scope(self, weight: Tensor) -> None:
        """Begin a rollout, in which nobody writes to `weight`."""
        if self.keeps_evaluation and self._scope is None:
            self._scope, self._scoped_weight = next(VERSIONS), weight

    def end_scope(self) -> None:
        """End it."""
        self._scope = self._scoped_weight = None
        self.forget_evaluation()

    @property
    def in_scope(self) -> bool:
        """Whether a rollout goes on."""
        return self._scope is not None

    def payload(
        self,
        weight: Tensor,
        cast: Callable[[], QuantizedTensor],
        *,
        dgrad: bool,
        trains: bool,
    ) -> QuantizedTensor:
        """Return the payload for forward, or with `dgrad` for backward: as kept, or cast now.

        Args:
            weight: weight as it is stored.
            cast: makes the payload.
            dgrad: whether backward asks.
            trains: whether the forward belongs to training.
        """
        version = self._version_of(weight)
        if version is None or is_capturing(weight.device):
            return cast()
        if version != self._version or (trains and not self.between_steps):
            self.forget()  # before a new payload takes memory
        if dgrad in self._payloads:
            return self._payloads[dgrad]
        between = self.between_steps == "both" or (self.between_steps and not dgrad)
        if not (between or (self.keeps_evaluation and not trains)):
            return cast()
        with torch.inference_mode(False), torch.no_grad():
            payload = cast()
        self._payloads[dgrad], self._version = payload, version
        return payload

    def _version_of(self, weight: Tensor) -> int | None:
        """Return a number that no other value of a weight has; None: nobody can tell."""
        if isinstance(weight, SplitWeight):
            return weight.halves.version
        return self._scope if weight is self._scoped_weight else None

    @property
    def num_layouts(self) -> int:
        """Count the payloads that are kept between steps."""
        return 2 if self.between_steps == "both" else int(self.between_steps or 0)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are held now."""
        return [tensor for x in self._payloads.values() for tensor in (x.qdata, x.scale)]

    def __reduce__(self) -> Any:
        return StackedCache, (self.keeps_evaluation,)
