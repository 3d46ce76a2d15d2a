"""The tuples of arguments of softmax losses."""

from typing import NamedTuple

from torch import Tensor


class LogitForm(NamedTuple):
    """``z = softcap * tanh(scale * x / softcap) / temperature``, rounded to x's dtype in each step.

    Attributes:
        scale: factor of the product of hidden states and weight.
        softcap: bound of the logits before the temperature, or 0 for none.
        temperature: divisor of the logits.
    """

    scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0


class LossTerms(NamedTuple):
    """The factors of each token's loss, and what is known of its softmax.

    ``loss = mass * lse - hit * z[label] - smooth * sum(class_weight * z) + spread * entropy``

    Legend: M tokens, V classes.

    Attributes:
        label: (M,) int64; negative for a token without loss, whose factors are 0.
        mass, hit: (M,) float32.
        smooth: (M,) float32, or None without label smoothing.
        class_weight: (V,) float32, or None for ones.
        spread: (M,) float32, or None if the entropies have no gradient.
        lse: (M,) float32, logarithm of the sum of exp(z), or None if it is not yet known.
        entropy: (M,) float32, required with `spread`.
    """

    label: Tensor
    mass: Tensor
    hit: Tensor
    smooth: Tensor | None = None
    class_weight: Tensor | None = None
    spread: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None

    def part(self, rows: slice) -> "LossTerms":
        """Return the terms of some tokens."""
        shared = self.class_weight
        parts = (None if t is None else t[rows] for t in self._replace(class_weight=None))
        return LossTerms(*parts)._replace(class_weight=shared)
