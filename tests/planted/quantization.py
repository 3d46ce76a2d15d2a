"""Faults in formats, scales and random bits."""

from tests.planted.fault import Fault

_TESTS = "tests/torch_fp8/quantization"
FAULTS = [
    Fault(
        "a power-of-two scale rounds down",
        "torch_fp8/quantization/scaling.py",
        "rounded = ((bits + _MANTISSA_MASK) & _EXPONENT_MASK)",
        "rounded = (bits & _EXPONENT_MASK)",
        f"{_TESTS}/test_scaling.py",
    ),
    Fault(
        "an outlier of the amax history is never recorded",
        "torch_fp8/quantization/scaling.py",
        "torch.where(is_outlier & ~last.signbit(), -last, newest)",
        "torch.where(is_outlier, -last, newest)",
        f"{_TESTS}/test_scaling.py",
    ),
    Fault(
        "a positive second moment may become zero",
        "torch_fp8/quantization/block_scaled.py",
        "codes = torch.where((codes == 0) & (x > 0), 1, codes)",
        "codes = torch.where((codes == 0) & (x > 1), 1, codes)",
        f"{_TESTS}/test_block_scaled.py",
    ),
    Fault(
        "the residual of a zero weight borrows from its sign",
        "torch_fp8/quantization/split_float.py",
        "applies = weight.isfinite() & ((weight != 0) | (residual >= 0))",
        "applies = weight.isfinite()",
        f"{_TESTS}/test_split_float.py tests/torch_fp8/tensor/test_halves.py",
    ),
    Fault(
        "the thresholds of a momentum are the same in each step",
        "torch_fp8/quantization/linear_int8.py",
        "turn = (step * _GOLDEN) & 0xFFFFFFFF",
        "turn = _GOLDEN & 0xFFFFFFFF",
        "tests/torch_fp8/optim/test_rounding_streams.py tests/torch_fp8/optim/test_muon.py",
    ),
    Fault(
        "the second half of a 64-bit key is dropped",
        "torch_fp8/quantization/stochastic_rounding.py",
        "return _signed(state & 0xFFFFFFFF), _signed(state >> 32)",
        "return _signed(state & 0xFFFFFFFF), 0",
        f"{_TESTS}/test_stochastic_rounding.py",
    ),
    Fault(
        "overrides are not checked against the other options",
        "torch_fp8/quantization/options.py",
        "        _check_override(config, pattern, options)\n",
        "        pass\n",
        "tests/torch_fp8/conversion/test_layer_options.py",
    ),
]
