"""GEMMs whose size cuBLASLt refuses: they run with additional rows of zeros.

For which sizes cuBLASLt has no algorithm depends on its version, the GPU and the scales. One
example is an H100 with rowwise scales, 9,216 columns and up to 256 rows
(https://github.com/pytorch/ao/issues/4582). The first GEMM of a refused size is tried again with
more rows. The process remembers the number that worked and pads later GEMMs of this size at once.
cuBLASLt refuses before it launches anything, so a CUDA graph that is being captured stays valid and
records the padded GEMM.
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
    """A class of GEMMs for which cuBLASLt makes the same choice.

    Attributes:
        device: the GPU.
        scales: the granularities of the operands.
        options: all other options that affect the choice of an algorithm.
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
    """Return the class of a GEMM; the arguments are those of torch's operator."""
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
"""Refused sizes, with the number to whose multiples their rows are padded."""


def whole(size: int, multiple: int = _MULTIPLES[0]) -> int:
    """Round `size` up to a multiple."""
    return -(-size // multiple) * multiple


def find_rows(
    refusal: RuntimeError, kind: Sizes, shape: torch.Size, product: Callable[[int], Tensor]
) -> Tensor:
    """Find the fewest additional rows that the GPU accepts, and return the product.

    The number is remembered for later GEMMs and reported.

    Args:
        refusal: the error of the GEMM without padding; any other error is raised again.
        kind: the key under which the answer is stored.
        shape: the rows and contracted columns of the refused GEMM.
        product: a function that runs the GEMM with rows padded to a multiple of its argument.
    Raises:
        RuntimeError: the GPU refuses these scales with every number of rows.
    """
    if _STATUS not in str(refusal):
        raise refusal
    (rows, contracted), (a, b) = shape, kind.scales
    gemm = f"GEMM of {a} by {b} scales with M = {rows}, K = {contracted}, N = {kind.cols}"
    for multiple in _MULTIPLES:
        try:
            output = product(multiple)
        except RuntimeError as error:
            if _STATUS not in str(error):
                raise
            continue
        if not any((known.device, known.scales) == kind[:2] for known in padded):
            warnings.warn(
                f"FP8: {kind.device} refuses a {gemm}. It runs padded to M = "
                f"{whole(rows, multiple)}, K = {kind.contracted}, and so do other refused GEMMs "
                "with these scales",
                stacklevel=2,
            )
        padded[kind] = multiple
        return output
    raise RuntimeError(
        f"{kind.device} refuses a {gemm}, even with more rows: choose another recipe"
    ) from refusal
