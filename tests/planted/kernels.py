"""Faults in Triton kernels and their launchers; the emulator runs them."""

from tests.planted.fault import Fault

_EMULATED = "tests/emulator/test_kernels.py::test_every_value_and_choice"
FAULTS = [
    Fault(
        "partial sums behind the first block are left out",
        "torch_fp8/kernels/column_sums.py",
        "for start in range(0, num_partials, BLOCK_R):",
        "for start in range(0, BLOCK_R, BLOCK_R):",
        f"{_EMULATED}[sums]",
    ),
    Fault(
        "the random words of a kernel differ from the reference's",
        "torch_fp8/kernels/stochastic_rounding.py",
        "    x = (x ^ (x >> 15)) * _SECOND\n    return x ^ (x >> 15)",
        "    x = (x ^ (x >> 15)) * _SECOND\n    return x ^ (x >> 14)",
        f"{_EMULATED}[adamw-values]",
    ),
    Fault(
        "a scale is one rounding off",
        "torch_fp8/kernels/fp8_cast.py",
        "    scale = tl.fma(tl.fma(-scale, FMAX, amax), 1.0 / FMAX, scale)\n",
        "",
        f"{_EMULATED}[casts-rowwise]",
    ),
    Fault(
        "negative values beyond the largest are not clamped",
        "torch_fp8/kernels/fp8_cast.py",
        "    y = divide(tl.where(x < -limit, -limit, y), r, s, False)",
        "    y = divide(y, r, s, False)",
        f"{_EMULATED}[casts-tensorwise]",
    ),
    Fault(
        "an all-zero group has the smallest scale",
        "torch_fp8/kernels/fp8_cast.py",
        "    return tl.where(bits == 0, 1.0, scale)",
        "    return scale",
        f"{_EMULATED}[casts-block_1x128]",
    ),
]
