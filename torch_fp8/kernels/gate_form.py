"""The form of the gated activation of experts, which operators hand to their kernels."""

from typing import NamedTuple


class GateForm(NamedTuple):
    """``gate * sigmoid(alpha * gate) * up``, or with limits as GPT-OSS has it.

    Attributes:
        interleaved: whether gate and up take turns in a row; else gate comes first.
        clamped: whether gate is at most `limit`, up within it on both sides, and up + 1 multiplied.
        alpha: factor of gate in the sigmoid, 1 unless clamped.
        limit: positive number.
    """

    interleaved: bool = False
    clamped: bool = False
    alpha: float = 1.0
    limit: float = 0.0
