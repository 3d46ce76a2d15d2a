"""Faults in Triton kernels and their launchers; the emulator runs them."""

_EMULATED = "tests/emulator/test_kernels.py::test_every_value_and_choice"
_SHUFFLED = "tests/emulator/test_kernels.py::test_in_a_random_order"
_BESIDE = "tests/emulator/test_kernels.py::test_in_lockstep[beside]"
_EDGES = "tests/emulator/test_kernels.py::test_in_lockstep[edges]"
_SIDE_BY_SIDE = "tests/emulator/test_kernels.py::test_in_lockstep[weights]"
_JOINED = "tests/emulator/test_kernels.py::test_in_lockstep[gradients]"
_GRAPHS = "tests/emulator/test_graphs.py"
_ALIGNED = (
    "tests/torch_fp8/kernels/test_adamw_compiled.py"
    "::test_one_tensor_that_is_not_aligned_makes_elements_move_one_by_one"
)
FAULTS = {
    ("torch_fp8/kernels/quick_launch.py", _GRAPHS): (
        "a graph takes a kernel's launches with other choices for one kind",
        "    key = tuple(options.items())\n",
        "    key = tuple(options)\n",
        "a graph does not know what a kernel writes",
        "self.kernel, self.writes, self.options = kernel, writes, options",
        "self.kernel, self.writes, self.options = kernel, {*sorted(writes)[1:]}, options",
        "graphs that run without Inductor launch a kernel's outline",
        "return self.kernel.run(*args, **options, **self.options)",
        "return super().run(*args, **options, **self.options)",
    ),
    ("torch_fp8/kernels/quick_launch.py", "tests/torch_fp8/kernels/test_quick_launch.py"): (
        "a size beside changing numbers does not choose the binary",
        'kernel.__dict__["_end"] = -changing or None',
        'kernel.__dict__["_end"] = ~changing if changing else None',
        "a tape replays the random bits of its recording",
        "recorder.launched(self, args, runner if end is None else None)",
        "recorder.launched(self, args, runner)",
        "a hook in place of Triton's chain sees no remembered launch",
        "            has_hooks = True\n",
        "            has_hooks = False\n",
    ),
    ("torch_fp8/kernels/launch_tape.py", "tests/torch_fp8/kernels/test_launch_tape.py"): (
        "a tape is played although a kernel has hooks",
        "type(tape) is Tape and tape.hooks == tape.no_hooks",
        "type(tape) is Tape",
        "a tape of another device is played",
        "        known = (device, *key)\n",
        "        known = (0, *key)\n",
    ),
    ("torch_fp8/kernels/grad_codec.py", f"{_SHUFFLED}[gradient]"): (
        "a new gradient of 8 bits has no multiplier",
        "        tl.store(multiplier_ptr, 1.0)\n",
        "        pass\n",
    ),
    ("torch_fp8/kernels/quick_launch.py", "tests/benchmarks/test_compiled_block.py"): (
        "Inductor passes floats to kernels in double precision",
        "                parameter.is_constexpr = True\n",
        "                pass\n",
        "a graph's kernel takes FP8 tensors for numbers",
        'end += f"\\n    {name} = {name}.to(tl.pointer_type(tl.uint8))"',
        "pass",
        "Inductor computes a kernel's input once per use",
        "    return (base if same else x).as_strided(x.shape, x.stride())\n",
        "    return x\n",
    ),
    ("torch_fp8/kernels/cast_launch.py", "tests/benchmarks/test_compiled_block.py"): (
        "a graph views each FP8 tensor as bytes in every step",
        "is_plain = x.dtype.itemsize != 1 or isinstance(x, FunctionalTensor)",
        "is_plain = x.dtype.itemsize != 1",
    ),
    ("torch_fp8/nn/rms_norm.py", _GRAPHS): (
        "a norm in a graph reads a sum that another kernel has written",
        "        if x is None or options.scale is None or not is_visible(x):\n",
        "        if True:\n",
    ),
    ("torch_fp8/autograd/function.py", "tests/benchmarks/test_compiled_block.py"): (
        "a graph adds again what a norm has added",
        "    set_proxy_slot(old, mode.tracer, get_proxy_slot(new, mode.tracer))\n",
        "    pass\n",
    ),
    ("torch_fp8/kernels/quantize_beside.py", _BESIDE): (
        "a cast beside a transpose swaps its two layouts",
        "*pointers((partial, slot, by_row, by_col, payload, transpose), unused),",
        "*pointers((partial, slot, by_col, by_row, payload, transpose), unused),",
        "the last tiles of a payload are not transposed beside a cast",
        "programs + cdiv(payload.shape[0], BLOCK) *",
        "programs + payload.shape[0] // BLOCK *",
        "rows that need padding are cast beside a transpose without",
        '        PAD=pad_of(rows, "tensorwise", True),\n',
        "        PAD=1,\n",
        "a slot is not raised beside a transpose",
        "        AMAX=slot is not None,\n",
        "        AMAX=False,\n",
    ),
    ("torch_fp8/kernels/side_by_side.py", _JOINED): (
        "the third gradient lies where the second one is",
        "x_ptr, cols, start = c_ptr, cols_c, cols_a + cols_b",
        "x_ptr, cols, start = c_ptr, cols_c, cols_a",
        "a cast of gradients side by side raises no slot",
        "        push_amax(amax_ptr, x)\n",
        "        pass\n",
    ),
    ("torch_fp8/kernels/side_by_side.py", _SIDE_BY_SIDE): (
        "the third weight of a payload lies where the second one is",
        "c_ptr, rows_c, rows_a + rows_b",
        "c_ptr, rows_c, rows_a",
        "the last tiles of weights side by side are not cast",
        "sum(cdiv(n, BLOCK) for n in rows)",
        "cdiv(sum(rows), BLOCK)",
        "weights side by side are cast with the scale of the first two",
        "scale = tl.maximum(scale, tl.load(scale_c_ptr))",
        "scale = tl.maximum(scale, scale)",
    ),
    ("torch_fp8/kernels/cast_launch.py", _EDGES): (
        "only the first column of tiles is launched",
        "return (cdiv(x.shape[0], self.rows) * cdiv(x.shape[1], self.cols),)",
        "return (cdiv(x.shape[0], self.rows),)",
    ),
    ("torch_fp8/kernels/quantize.py", f"{_EMULATED}[sums]"): (
        "the sums of a transposed matrix are over its columns",
        "sums = TileSums(int(_is_turned(x)))",
        "sums = TileSums()",
    ),
    ("torch_fp8/kernels/adamw.py", _ALIGNED): (
        "a gradient that is not aligned moves 16 bytes at a time",
        "(fixed.address_bits | address) % 16 == 0",
        "fixed.address_bits % 16 == 0",
    ),
    ("torch_fp8/kernels/swiglu_backward.py", _EDGES): (
        "the gradients of gate and up change places in one matrix",
        "(0, cols) if gate_first else (cols, 0)",
        "(0, cols)",
        "the second gradient in one matrix is not transposed",
        "ROW, COL, dgate_start + cols)",
        "ROW, COL, cols)",
    ),
    ("torch_fp8/kernels/quantize_kernels.py", f"{_EMULATED}[sums]"): (
        "partial sums behind the first block are left out",
        "for start in range(0, num_partials, BLOCK_R):",
        "for start in range(0, BLOCK_R, BLOCK_R):",
    ),
    ("torch_fp8/kernels/fast_math.py", f"{_EMULATED}[adamw-values]"): (
        "the random words of a kernel differ from the reference's",
        "    x = (x ^ (x >> 15)) * _SECOND\n    return x ^ (x >> 15)",
        "    x = (x ^ (x >> 15)) * _SECOND\n    return x ^ (x >> 14)",
    ),
    ("torch_fp8/kernels/fp8_cast.py", f"{_EMULATED}[casts-rowwise]"): (
        "a scale is one rounding off",
        "    scale = tl.fma(tl.fma(-scale, FMAX, amax), 1.0 / FMAX, scale)\n",
        "",
    ),
    ("torch_fp8/kernels/fp8_cast.py", f"{_EMULATED}[casts-tensorwise]"): (
        "negative values beyond the largest are not clamped",
        "    y = divide(tl.where(x < -limit, -limit, y), r, s, False)",
        "    y = divide(y, r, s, False)",
    ),
    ("torch_fp8/kernels/fp8_cast.py", f"{_EMULATED}[casts-block_1x128]"): (
        "an all-zero group has the smallest scale",
        "    return tl.where(bits == 0, 1.0, scale)",
        "    return scale",
    ),
}
