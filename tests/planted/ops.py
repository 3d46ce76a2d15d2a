"""Faults in operators and their references."""

from tests.planted.fault import Fault

_TESTS = "tests/torch_fp8/ops"
FAULTS = [
    Fault(
        "a graph for several lengths serves those alone that need padding as the first did",
        "torch_fp8/kernels/cast_launch.py",
        "return pad if not is_known(rows) or rows % pad else 1",
        "return pad if rows % pad else 1",
        "tests/emulator/test_graphs.py",
    ),
    Fault(
        "a graph launches kernels on a card that has no FP8",
        "torch_fp8/ops/registry.py",
        "and not emulates_casts(x.device)",
        "",
        "tests/torch_fp8/compile/test_visible_kernels.py",
    ),
    Fault(
        "sums of ranks round with the bits of their first message",
        "torch_fp8/ops/messages.py",
        "index = element_index(x.shape[0], x.shape[1], first, 0, GROUP_SIZE, x.device)",
        "index = element_index(x.shape[0], x.shape[1], 0, 0, GROUP_SIZE, x.device)",
        f"{_TESTS}/test_messages.py",
    ),
    Fault(
        "an average over ranks is rounded with the bits of the last one",
        "torch_fp8/ops/grad_codec.py",
        "        self.exchange()\n        return self._keys(-1, self.exchanges)",
        "        self.exchange()\n        return self._keys(-1, 1)",
        "tests/torch_fp8/tensor/test_float8_grad.py tests/torch_fp8/optim/test_moments.py",
    ),
    Fault(
        "a sum of micro-batches is rounded with the same bits each time",
        "torch_fp8/ops/grad_codec.py",
        "        return self._keys(self.rank, self.count)",
        "        return self._keys(self.rank, 1)",
        "tests/torch_fp8/tensor/test_float8_grad.py",
    ),
    Fault(
        "weight decay of Adam is added to a gradient that is maximized before it",
        "torch_fp8/ops/adamw.py",
        "    if scalars.maximize:\n        grad = -grad\n    return grad + weight * scalars",
        "    if scalars.maximize:\n        weight = -weight\n    return grad + weight * scalars",
        f"{_TESTS}/test_adamw.py tests/torch_fp8/optim/test_optimizer.py",
    ),
    Fault(
        "gate's gradient is cast with the scale of up's",
        "torch_fp8/ops/swiglu_backward.py",
        "for d in swiglu_backward.reference(inputs)])",
        "for d in swiglu_backward.reference(inputs)[::-1]])",
        f"{_TESTS}/test_producers.py tests/torch_fp8/nn/test_gated_mlp.py",
    ),
    Fault(
        "gate and up change places in the joined gradient",
        "torch_fp8/ops/swiglu_backward.py",
        "torch.cat([dgate, dup] if gate_first else [dup, dgate], dim=1)",
        "torch.cat([dgate, dup], dim=1)",
        f"{_TESTS}/test_producers.py",
    ),
    Fault(
        "a product in a graph loses the bias that the GEMM does not add",
        "torch_fp8/ops/scaled_mm.py",
        "    return output if bias is None or in_gemm else output + bias\n\n\ndef _multiply",
        "    return output\n\n\ndef _multiply",
        "tests/torch_fp8/compile/test_visible_products.py",
    ),
    Fault(
        "a graph gives torch's operator sizes that it refuses on CUDA",
        "torch_fp8/quantization/payload_shape.py",
        "statically_known_true(size % GEMM_ALIGNMENT == 0)",
        "statically_known_true(size % 4 == 0)",
        "tests/torch_fp8/compile/test_visible_products.py",
    ),
]
