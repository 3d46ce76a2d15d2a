"""`scaled_grouped_matmul`: one FP8 GEMM for each expert, in one call.

The rows of a mixture of experts are sorted by expert, and `offs` holds the end of each expert's
rows. Two forms cover the three GEMMs of a layer:

* ``rows`` multiplies each row by the weight of its expert (fprop and dgrad),
* ``sums`` contracts the rows of each expert (wgrad).

Both operands are contiguous along the contraction dimension, with a scale for each of their rows,
as in `torch_fp8.ops.scaled_mm`. On the CPU each group is one call of that operator, so the results
have the same bits. CUDA runs ``torch._scaled_grouped_mm``, which exists for sm_90 and sm_100.

Legend: E experts, M rows of all experts, K in, N out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torch_fp8.ops.quantize import QuantizedTensor
from torch_fp8.ops.registry import define
from torch_fp8.ops.scaled_mm import cast, scaled_matmul
from torch_fp8.quantization.formats import GEMM_ALIGNMENT

MOST_GROUPS = 1023
"""The largest number of groups that torch's kernel supports."""
_CAPABILITIES = ((9, 0), (10, 0))


def reason_not_grouped(device: torch.device, emulate: bool) -> str | None:
    """Return why `device` has no FP8 grouped GEMM, or None if it has one, or emulates it."""
    if device.type != "cuda" or emulate:
        return None
    if not hasattr(torch, "_scaled_grouped_mm"):
        return f"torch {torch.__version__} has no FP8 grouped GEMM"
    capability = torch.cuda.get_device_capability(device)
    if capability in _CAPABILITIES:
        return None
    number = f"sm_{capability[0]}{capability[1]}"
    return f"torch has FP8 grouped GEMMs only for sm_90 and sm_100, but this card is {number}"


def scaled_grouped_matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    offs: Tensor,
    form: str,
    out_dtype: torch.dtype,
    *,
    fast_accum: bool = False,
    emulate: bool = False,
) -> Tensor:
    """Multiply the FP8 payloads of each group.

    Args:
        a: rows: (M, K) with scale (M, 1). sums: (N, M) with scale (E, N).
        b: rows: (E, N, K) with scale (E, N, 1). sums: (K, M) with scale (E, K).
        offs: (E,) int32, the end (exclusive) of each group. On CUDA ``sums`` needs non-empty groups
            of a multiple of 16 rows, as `torch_fp8.ops.moe_rows` makes them.
        form: ``"rows"`` or ``"sums"``.
        out_dtype: float32, bfloat16 or float16; CUDA rounds to bfloat16 first.
        fast_accum, emulate: see `torch_fp8.ops.scaled_mm.scaled_matmul`.
    Returns:
        rows: (M, N), zeros after the last group. sums: (E, N, K), zeros for an empty group.
    """
    return _call(a.qdata, a.scale, b.qdata, b.scale, offs, form, out_dtype, fast_accum, emulate)


def _rows(payload: Tensor, scale: Tensor) -> QuantizedTensor:
    # (R, C) and (R, 1)
    return QuantizedTensor(payload.contiguous(), scale.reshape(-1, 1), "rowwise")


def _reference(*args: Any) -> Tensor:
    """Compute one group at a time; the host reads the ends of the groups."""
    a, a_scale, b, b_scale, offs, form, out_dtype, fast_accum, emulate = args
    output = _fake(*args).zero_()
    start = 0
    for group, end in enumerate(offs.tolist()):
        if end > start:
            rows, options = slice(start, end), {"fast_accum": fast_accum, "emulate": emulate}
            if form == "rows":
                left, right = _rows(a[rows], a_scale[rows]), _rows(b[group], b_scale[group])
            else:
                left, right = (_rows(x[:, rows], s[group]) for x, s in ((a, a_scale), (b, b_scale)))
            product = scaled_matmul(left, right, out_dtype, **options)
            output[rows if form == "rows" else group] = product
        start = end
    return output


def _on_cuda(*args: Any) -> Tensor:
    a, a_scale, b, b_scale, offs, form, out_dtype, fast_accum, emulate = args
    if emulate:
        return _reference(*args)
    if not (a.numel() and b.numel()):
        return _fake(*args).zero_()
    size = _fake(*args).shape[-2:]
    if form == "rows":
        (a, _), (b, b_scale) = _aligned(a, a_scale, rows=False), _aligned(b, b_scale.squeeze(-1))
    else:
        (a, a_scale), (b, b_scale) = _aligned(a, a_scale), _aligned(b, b_scale)
    output: Tensor = torch._scaled_grouped_mm(
        a,
        b.transpose(-2, -1),  # (E, K, N) or (M, K), column-major
        a_scale.reshape(-1),
        b_scale if form == "rows" else b_scale.reshape(-1),
        offs=offs,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )
    if form == "rows":  # the kernel does not write the rows after the last group
        behind = torch.arange(a.shape[0], device=a.device) >= offs[-1]
        output.masked_fill_(behind[:, None], 0)
    return cast(output[..., : size[0], : size[1]], out_dtype)


def _aligned(x: Tensor, scale: Tensor, *, rows: bool = True) -> tuple[Tensor, Tensor]:
    """Pad a payload (..., R, C), and its scales (..., R), to the multiples that the kernel needs.

    Args:
        x: the payload, padded with zeros.
        scale: the scales, padded with ones.
        rows: whether R must be a multiple, too.
    """
    more_rows = -x.shape[-2] % GEMM_ALIGNMENT if rows else 0
    more_cols = -x.shape[-1] % GEMM_ALIGNMENT
    if more_rows or more_cols:
        # as bytes: pad has no FP8
        padded = F.pad(x.view(torch.uint8), (0, more_cols, 0, more_rows))
        x, scale = padded.view(x.dtype), F.pad(scale, (0, more_rows), value=1.0)
    return x, scale


def _fake(*args: Any) -> Tensor:
    a, _, b, _, offs, form, out_dtype, *_ = args
    size = (a.shape[0], b.shape[1]) if form == "rows" else (offs.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(size, dtype=out_dtype)


_call = define(
    "scaled_grouped_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offs, str form, "
    "ScalarType out_dtype, bool fast_accum, bool emulate) -> Tensor",
    _reference,
    _on_cuda,
    _fake,
)


@register_flop_formula(torch.ops.torch_fp8.scaled_grouped_mm)
def _flops(a_shape: tuple[int, int], *args: Any, **_: Any) -> int:
    """Count FLOPs from shapes: each row counts once, whatever its expert."""
    b_shape: tuple[int, ...] = args[1]
    return 2 * a_shape[0] * a_shape[1] * b_shape[-2 if len(b_shape) == 3 else 0]


def too_many(sizes: tuple[int, ...]) -> str | None:
    """Return why torch's kernel does not support weights of these sizes (E, N, K), or None."""
    if sizes[0] > MOST_GROUPS:
        return f"{sizes[0]} experts exceed the {MOST_GROUPS} that one grouped GEMM supports"
    return None
