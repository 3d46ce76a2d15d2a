"""The form of the gated activation of experts, an argument of operators and their kernels."""

from typing import NamedTuple


class GateForm(NamedTuple):
    """``gate * sigmoid(alpha * gate) * up``, or the clamped form of GPT-OSS.

    Attributes:
        interleaved: whether a row alternates gate and up; else all of gate comes first.
        clamped: whether gate <= limit, -limit <= up <= limit, and the factor is up + 1.
        alpha: factor of gate in the sigmoid; 1 unless clamped.
        limit: bound of the clamped form, positive there.
    """

    interleaved: bool = False
    clamped: bool = False
    alpha: float = 1.0
    limit: float = 0.0
