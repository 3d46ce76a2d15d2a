"""Faults in Triton kernels and their launchers; the emulator runs them."""

from tests.planted.fault import Fault

_EMULATED = "tests/emulator/test_kernels.py::test_every_value_and_choice"
_BESIDE = "tests/emulator/test_kernels.py::test_in_lockstep[beside]"
_SIDE_BY_SIDE = "tests/emulator/test_kernels.py::test_in_lockstep[weights]"
_GRAPHS = "tests/emulator/test_graphs.py"
FAULTS = [
    Fault(
        "a graph takes a kernel's launches with other choices for one kind",
        "torch_fp8/kernels/quick_launch.py",
        "    key = tuple(options.items())\n",
        "    key = tuple(options)\n",
        _GRAPHS,
    ),
    Fault(
        "a graph does not know what a kernel writes",
        "torch_fp8/kernels/quick_launch.py",
        "return Outline(kernel, args, writes, options)",
        "return Outline(kernel, args, {*sorted(writes)[1:]}, options)",
        _GRAPHS,
    ),
    Fault(
        "graphs that run without Inductor launch a kernel's outline",
        "torch_fp8/kernels/quick_launch.py",
        "return self.kernel.run(*args, **options, **self.options)",
        "return super().run(*args, **options, **self.options)",
        _GRAPHS,
    ),
    Fault(
        "Inductor passes floats to kernels in double precision",
        "torch_fp8/kernels/quick_launch.py",
        "                parameter.is_constexpr = True\n",
        "                pass\n",
        "tests/benchmarks/test_compiled_block.py",
    ),
    Fault(
        "Inductor computes a kernel's input once per use",
        "torch_fp8/kernels/quick_launch.py",
        "    return (base if same else x).as_strided(x.shape, x.stride())\n",
        "    return x\n",
        "tests/benchmarks/test_compiled_block.py",
    ),
    Fault(
        "a cast beside a transpose swaps its two layouts",
        "torch_fp8/kernels/quantize_beside.py",
        "*pointers((slot, by_row, by_col, payload, transpose), scale),",
        "*pointers((slot, by_col, by_row, payload, transpose), scale),",
        _BESIDE,
    ),
    Fault(
        "the last tiles of a payload are not transposed beside a cast",
        "torch_fp8/kernels/quantize_beside.py",
        "programs + cdiv(payload.shape[0], BLOCK) *",
        "programs + payload.shape[0] // BLOCK *",
        _BESIDE,
    ),
    Fault(
        "rows that need padding are cast beside a transpose without",
        "torch_fp8/kernels/quantize_beside.py",
        '        PAD=pad_of(rows, "tensorwise", True),\n',
        "        PAD=1,\n",
        _BESIDE,
    ),
    Fault(
        "a slot is not raised beside a transpose",
        "torch_fp8/kernels/quantize_beside.py",
        "        AMAX=slot is not None,\n",
        "        AMAX=False,\n",
        _BESIDE,
    ),
    Fault(
        "the third weight of a payload lies where the second one is",
        "torch_fp8/kernels/side_by_side.py",
        "c_ptr, rows_c, rows_a + rows_b",
        "c_ptr, rows_c, rows_a",
        _SIDE_BY_SIDE,
    ),
    Fault(
        "the last tiles of weights side by side are not cast",
        "torch_fp8/kernels/side_by_side.py",
        "sum(cdiv(n, BLOCK) for n in rows)",
        "cdiv(sum(rows), BLOCK)",
        _SIDE_BY_SIDE,
    ),
    Fault(
        "weights side by side are cast with the scale of the first two",
        "torch_fp8/kernels/side_by_side.py",
        "scale = tl.maximum(scale, tl.load(scale_c_ptr))",
        "scale = tl.maximum(scale, scale)",
        _SIDE_BY_SIDE,
    ),
    Fault(
        "partial sums behind the first block are left out",
        "torch_fp8/kernels/quantize_kernels.py",
        "for start in range(0, num_partials, BLOCK_R):",
        "for start in range(0, BLOCK_R, BLOCK_R):",
        f"{_EMULATED}[sums]",
    ),
    Fault(
        "the random words of a kernel differ from the reference's",
        "torch_fp8/kernels/fast_math.py",
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
