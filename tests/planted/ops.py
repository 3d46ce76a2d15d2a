"""Faults in operators and their references."""

_TESTS = "tests/torch_fp8/ops"
FAULTS = {
    ("torch_fp8/kernels/cast_launch.py", "tests/emulator/test_graphs.py"): (
        "a graph for several lengths serves those alone that need padding as the first did",
        "return pad if not is_known(rows) or rows % pad else 1",
        "return pad if rows % pad else 1",
    ),
    ("torch_fp8/ops/__init__.py", f"{_TESTS}/test_registry.py"): (
        "operators are missing until something imports their module",
        "    side_by_side,\n    smooth,\n",
        "    side_by_side,\n",
    ),
    ("torch_fp8/ops/registry.py", "tests/torch_fp8/compile/test_visible_kernels.py"): (
        "a graph launches kernels on a card that has no FP8",
        "and not emulates_casts(x.device)",
        "",
    ),
    ("torch_fp8/ops/messages.py", f"{_TESTS}/test_messages.py"): (
        "all groups of a message round with the bits of its first one",
        "index = element_index(x.shape[0], x.shape[1], 0, 0, GROUP_SIZE, x.device)",
        "index = element_index(x.shape[0], x.shape[1], 0, 0, 0, x.device)",
        "a sum of messages leaves one out",
        "    for row in others:\n        first",
        "    for row in others[1:]:\n        first",
    ),
    (
        "torch_fp8/ops/grad_codec.py",
        "tests/torch_fp8/tensor/test_float8_grad.py tests/torch_fp8/optim/test_moments.py",
    ): (
        "an average over ranks is rounded with the bits of the last one",
        "        self.exchange()\n        return self._keys(-1, self.exchanges)",
        "        self.exchange()\n        return self._keys(-1, 1)",
    ),
    ("torch_fp8/ops/adamw.py", f"{_TESTS}/test_adamw.py"): (
        "a weight without a residual is rounded with the bits of its moments",
        "            words = second_words(words, keys)\n",
        "            pass\n",
    ),
    ("torch_fp8/ops/grad_codec.py", "tests/torch_fp8/tensor/test_float8_grad.py"): (
        "a copied 8-bit gradient rounds again with its first bits",
        "        twin.count, twin.exchanges = self.count, self.exchanges\n",
        "",
        "a gradient that was multiplied by infinity passes for finite",
        "GRADIENT.max * source.multiplier)",
        "GRADIENT.max)",
        "ranks that had other numbers of micro-batches round their average's sums apart",
        "        self.exchanges += 1\n        self.count = 0\n",
        "        self.exchanges += 1\n",
        "the last rows are missing in a norm",
        "for row in range(0, rows, step)",
        "for row in range(0, max(rows - step + 1, 1), step)",
        "a sum of micro-batches is rounded with the same bits each time",
        "        return self._keys(self.rank, self.count)",
        "        return self._keys(self.rank, 1)",
    ),
    ("torch_fp8/ops/adamw.py", f"{_TESTS}/test_adamw.py tests/torch_fp8/optim/test_optimizer.py"): (
        "weight decay of Adam is added to a gradient that is maximized before it",
        "    if scalars.maximize:\n        grad = -grad\n    return grad + weight * scalars",
        "    if scalars.maximize:\n        weight = -weight\n    return grad + weight * scalars",
    ),
    (
        "torch_fp8/ops/swiglu_backward.py",
        f"{_TESTS}/test_producers.py tests/torch_fp8/nn/test_gated_mlp.py",
    ): (
        "gate's gradient is cast with the scale of up's",
        "for d in swiglu_backward.reference(inputs)])",
        "for d in swiglu_backward.reference(inputs)[::-1]])",
    ),
    ("torch_fp8/ops/swiglu_backward.py", f"{_TESTS}/test_producers.py"): (
        "gate and up change places in the joined gradient",
        "torch.cat([dgate, dup] if gate_first else [dup, dgate], dim=1)",
        "torch.cat([dgate, dup], dim=1)",
    ),
    ("torch_fp8/ops/gemm_operand.py", f"{_TESTS}/test_scaled_mm.py"): (
        "cuBLASLt gets a scale at an address that it refuses",
        "(x.qdata.storage_offset() | scale_offset)",
        "x.qdata.storage_offset()",
    ),
    ("torch_fp8/ops/scaled_mm.py", "tests/torch_fp8/compile/test_visible_products.py"): (
        "a product in a graph loses the bias that the GEMM does not add",
        "    return output if bias is None or in_gemm else output + bias\n\n\ndef _multiply",
        "    return output\n\n\ndef _multiply",
    ),
    (
        "torch_fp8/quantization/payload_shape.py",
        "tests/torch_fp8/compile/test_visible_products.py",
    ): (
        "a graph gives torch's operator sizes that it refuses on CUDA",
        "statically_known_true(size % GEMM_ALIGNMENT == 0)",
        "statically_known_true(size % 4 == 0)",
    ),
}
