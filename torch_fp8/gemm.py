"""The only caller of torch's scaled matmul, and what each device can run.

Every GEMM has the form ``a @ b.T`` with both operands contiguous along the contraction dimension,
the one layout that Hopper's FP8 tensor cores take. Sizes that they do not take are zero-padded
here, so that any shape works; zeros add nothing to a sum.

What the device at hand cannot run natively runs through `scaled_matmul_reference` if emulation was
asked for, and raises otherwise. The CPU is emulation as a whole: torch's operator runs tensorwise
and rowwise there, block scales go through the reference.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from torch_fp8.formats import GEMM_ALIGNMENT
from torch_fp8.quantize import QuantizedTensor, dequantize
from torch_fp8.recipe import RECIPES, Granularity, make_recipe

MIN_CAPABILITY = (8, 9)

# granularity -> CUDA compute capabilities whose scaled matmul takes it. Block scales of 128 exist
# for Hopper alone and need CUDA 12.9 (cuBLASLt); MX block scales need Blackwell's tensor cores.
_CAPABILITIES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "tensorwise": ((8, 9), (99, 9)),
    "rowwise": ((9, 0), (99, 9)),
    "block_1x128": ((9, 0), (9, 0)),
    "block_128x128": ((9, 0), (9, 0)),
    "block_1x32": ((10, 0), (99, 9)),
}
_MIN_CUDA_OF_BLOCKS = (12, 9)
_CPU_NATIVE = ("tensorwise", "rowwise")

_SCALING_TYPE: dict[str, ScalingType] = {
    "tensorwise": ScalingType.TensorWise,
    "rowwise": ScalingType.RowWise,
    "block_1x128": ScalingType.BlockWise1x128,
    "block_128x128": ScalingType.BlockWise128x128,
    "block_1x32": ScalingType.BlockWise1x32,
}


def scaled_matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    *,
    fast_accum: bool = False,
    emulate: bool = False,
) -> Tensor:
    """``dequantize(a) @ dequantize(b).T`` on the FP8 payloads.

    Args:
        a: (R, C).
        b: (S, C). At most one of a and b is E5M2.
        out_dtype: float32, bfloat16 or float16.
        fast_accum: let the tensor core accumulate in its own, narrower format.
        emulate: run the reference path where the device cannot run this GEMM.
    Returns:
        (R, S) of `out_dtype`.
    Raises:
        ValueError: the device cannot run this GEMM natively and `emulate` is False.
    """
    rows, cols = a.qdata.shape[0], b.qdata.shape[0]
    device = a.qdata.device
    if 0 in (rows, cols, a.qdata.shape[1]):
        return torch.zeros(rows, cols, dtype=out_dtype, device=device)
    if device.type == "cpu":
        if a.granularity not in _CPU_NATIVE:
            return scaled_matmul_reference(a, b, out_dtype)
        # A padded GEMM would give the same sums; the CPU takes any shape.
        return _scaled_mm(a, b, out_dtype, fast_accum)
    reason = _unsupported(a.granularity, device) or _unsupported(b.granularity, device)
    if reason is None:
        return _scaled_mm(_pad(a), _pad(b, rows=True), out_dtype, fast_accum)[:, :cols]
    if emulate:
        return scaled_matmul_reference(a, b, out_dtype)
    raise ValueError(f"{reason}; choose another recipe, or FP8Config(emulate=True)")


def scaled_matmul_reference(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype
) -> Tensor:
    """``dequantize(a) @ dequantize(b).T`` in float32, rounded once to `out_dtype`."""
    return (dequantize(a) @ dequantize(b).t()).to(out_dtype)


def check_device(device: torch.device, recipe_name: str, emulate: bool) -> None:
    """Raise ValueError if `device` cannot run the recipe and emulation was not asked for."""
    if device.type in ("cpu", "meta") or emulate:
        return
    if device.type != "cuda" or torch.version.hip is not None:
        raise ValueError(
            f"FP8 runs on NVIDIA GPUs of compute capability 8.9 and above, and in emulation on the "
            f"CPU; this device is {device.type!r}. Use precision 'bf16-mixed' here, or "
            "FP8Config(emulate=True)"
        )
    capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    if capability < MIN_CAPABILITY:
        raise ValueError(
            f"{name} (sm_{capability[0]}{capability[1]}) has no FP8 tensor cores: they come with "
            "sm_89 (Ada), sm_90 (Hopper) and later. Use precision 'bf16-mixed' on this card, or "
            "FP8Config(emulate=True) to try out the numerics, slowly"
        )
    reason = _unsupported_recipe(recipe_name, device)
    if reason is not None:
        runs = [r for r in RECIPES if _unsupported_recipe(r, device) is None]
        raise ValueError(
            f"recipe {recipe_name!r}: {reason}. It runs {', '.join(runs)}; "
            "choose one of these, recipe='auto', or FP8Config(emulate=True)"
        )


def resolve_auto(device: torch.device) -> str:
    """The recipe that ``auto`` stands for on `device`.

    Tensorwise everywhere today: it is the fastest that published measurements show on Hopper among
    those that quantize by the tensor at hand, and the CPU gives what Hopper gives. A measurement on
    another architecture that says otherwise belongs here.
    """
    del device
    return "tensorwise"


def backend_name(device: torch.device, recipe_name: str, emulate: bool) -> str:
    """One line on what runs the GEMMs, for the start-up summary."""
    if device.type != "cuda":
        return f"emulation on {device.type.upper() if device.type == 'cpu' else device.type}"
    capability = torch.cuda.get_device_capability(device)
    card = f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]})"
    native = capability >= MIN_CAPABILITY and _unsupported_recipe(recipe_name, device) is None
    if emulate and not native:
        return f"emulation on {card}"
    return f"torch scaled_mm on {card}"


def _unsupported_recipe(name: str, device: torch.device) -> str | None:
    recipe = make_recipe(name)
    for spec in (recipe.input, recipe.weight, recipe.grad_output):
        reason = _unsupported(spec.granularity, device)
        if reason is not None:
            return reason
    return None


def _unsupported(granularity: Granularity, device: torch.device) -> str | None:
    """Why `device` cannot run a GEMM with this granularity, or None."""
    capability = torch.cuda.get_device_capability(device)
    least, most = _CAPABILITIES[granularity]
    if not least <= capability <= most:
        card = f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]})"
        return f"{card} cannot run {granularity} GEMMs"
    if granularity.startswith("block_") and _cuda_version() < _MIN_CUDA_OF_BLOCKS:
        return f"{granularity} GEMMs need CUDA 12.9, this torch was built with {torch.version.cuda}"
    return None


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


def _scaled_mm(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    scale_a, scale_b = a.scale, b.scale
    if a.granularity == "rowwise":
        scale_b = scale_b.t()
    return F.scaled_mm(
        a.qdata,
        b.qdata.t(),
        scale_a,
        _SCALING_TYPE[a.granularity],
        scale_b,
        _SCALING_TYPE[b.granularity],
        swizzle_a=SwizzleType.NO_SWIZZLE,
        swizzle_b=SwizzleType.NO_SWIZZLE,
        output_dtype=out_dtype,
        use_fast_accum=fast_accum,
    )


def _pad(x: QuantizedTensor, rows: bool = False) -> QuantizedTensor:
    """x with its contraction dimension (and its rows) zero-padded to what the tensor core takes."""
    num_rows, num_cols = x.qdata.shape
    pad_cols = -num_cols % GEMM_ALIGNMENT
    pad_rows = -num_rows % GEMM_ALIGNMENT if rows else 0
    if not pad_cols and not pad_rows:
        return x
    qdata = F.pad(x.qdata.view(torch.uint8), (0, pad_cols, 0, pad_rows)).view(x.qdata.dtype)
    scale = x.scale
    if pad_rows and scale.ndim == 2 and scale.shape[0] == num_rows:
        scale = F.pad(scale, (0, 0, 0, pad_rows), value=1.0)
    return QuantizedTensor(qdata, scale, x.granularity)
