"""GEMMs that cuBLASLt refuses because of their size: they run with more rows, which are zeros.

Which sizes cuBLASLt has no algorithm for depends on its version, the card and the scales. One
example is an H100 with rowwise scales, 9,216 columns and up to 256 rows
(https://github.com/pytorch/ao/issues/4582). The first GEMM of a refused size is tried again with
more rows. The process remembers the number that was taken, so that later GEMMs of this size are
padded at once. cuBLASLt refuses before it launches anything: a CUDA graph that is being captured
stays valid, and records the padded GEMM.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fp8.ops.quantize import QuantizedTensor

_STATUS = "CUBLAS_STATUS_NOT_SUPPORTED"
_MULTIPLES = (128, 256, 512)


class Sizes(NamedTuple):
    """A kind of GEMMs that are refused alike.

    Attributes:
        device: the card.
        scales: granularities of the operands.
        options: all else on which the choice of an algorithm depends.
        rows, contracted, cols: the sizes of the product, the first two in multiples of 128.
    """

    device: torch.device
    scales: tuple[str, str]
    options: tuple[Any, ...]
    rows: int
    contracted: int
    cols: int


def sizes(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Tensor | None,
) -> Sizes:
    """Return the kind of a GEMM; the arguments are those of torch's operator."""
    rows, contracted = a.qdata.shape
    return Sizes(
        a.qdata.device,
        (a.granularity, b.granularity),
        (a.qdata.dtype, b.qdata.dtype, out_dtype, fast_accum, bias is not None),
        whole(rows),
        whole(contracted),
        b.qdata.shape[0],
    )


padded: dict[Sizes, int] = {}
"""Sizes that were refused, and the number of whose multiples their rows are padded to."""


def whole(size: int, multiple: int = _MULTIPLES[0]) -> int:
    """Round `size` up to a multiple."""
    return -(-size // multiple) * multiple


def find_rows(
    refusal: RuntimeError, kind: Sizes, shape: torch.Size, product: Callable[[int], Tensor]
) -> Tensor:
    """Return the product with more rows, as few as the card takes; remember and report them.

    Args:
        refusal: error of the GEMM without padding. Any error but this refusal is raised again.
        kind: key under which the answer is remembered.
        shape: rows and contracted columns of the GEMM that was refused.
        product: function that runs the GEMM with rows padded to a multiple of its argument.
    Raises:
        RuntimeError: the card refuses these scales with every number of rows.
    """
    if _STATUS not in str(refusal):
        raise refusal
    (rows, contracted), (a, b) = shape, kind.scales
    gemm = f"GEMM of {a} by {b} scales with M = {rows}, K = {contracted}, N = {kind.cols}"
    refused = {tuple(shape)}
    for multiple in _MULTIPLES:
        larger = whole(rows, multiple), kind.contracted
        if larger in refused:
            continue
        refused.add(larger)
        try:
            output = product(multiple)
        except RuntimeError as error:
            if _STATUS not in str(error):
                raise
            continue
        if not any((known.device, known.scales) == kind[:2] for known in padded):
            warnings.warn(
                f"FP8: {kind.device} refuses a {gemm}. It runs padded to M = {larger[0]}, K = "
                f"{larger[1]}, and so do other refused GEMMs with these scales",
                stacklevel=2,
            )
        padded[kind] = multiple
        return output
    raise RuntimeError(
        f"{kind.device} refuses a {gemm}, even with more rows: choose another recipe"
    ) from refusal
