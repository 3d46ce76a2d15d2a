"""The operators ``torch_fp8::*``, each with its reference, and the scaled matmul.

Importing the package defines all operators, so that a saved graph finds those that it calls.
"""

from torch_fp8.ops import (  # noqa: F401
    cross_entropy,
    expert_gate,
    linear_cross_entropy,
    moe_rows,
    quantize,
    quantize_beside,
    rms_norm,
    scaled_grouped_mm,
    scaled_mm,
    side_by_side,
    smooth,
    swiglu,
    swiglu_backward,
    transpose,
)
