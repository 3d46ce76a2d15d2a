"""Faults in formats, scales and random bits."""

_TESTS = "tests/torch_fp8/quantization"
FAULTS = {
    ("torch_fp8/quantization/scaling.py", f"{_TESTS}/test_scaling.py"): (
        "a power-of-two scale rounds down",
        "rounded = ((bits + _MANTISSA_MASK) & _EXPONENT_MASK)",
        "rounded = (bits & _EXPONENT_MASK)",
        "an outlier of the amax history is never recorded",
        "torch.where(is_outlier & ~last.signbit(), -last, newest)",
        "torch.where(is_outlier, -last, newest)",
    ),
    ("torch_fp8/quantization/block_scaled.py", f"{_TESTS}/test_block_scaled.py"): (
        "a positive second moment may become zero",
        "codes = torch.where((codes == 0) & (x > 0), 1, codes)",
        "codes = torch.where((codes == 0) & (x > 1), 1, codes)",
    ),
    (
        "torch_fp8/quantization/split_float.py",
        f"{_TESTS}/test_split_float.py tests/torch_fp8/tensor/test_halves.py",
    ): (
        "the residual of a zero weight borrows from its sign",
        "applies = weight.isfinite() & ((weight != 0) | (residual >= 0))",
        "applies = weight.isfinite()",
    ),
    (
        "torch_fp8/quantization/linear_int8.py",
        "tests/torch_fp8/optim/test_rounding_streams.py tests/torch_fp8/optim/test_muon.py",
    ): (
        "the thresholds of a momentum are the same in each step",
        "turn = (step * _GOLDEN) & 0xFFFFFFFF",
        "turn = _GOLDEN & 0xFFFFFFFF",
    ),
    ("torch_fp8/quantization/stochastic_rounding.py", f"{_TESTS}/test_stochastic_rounding.py"): (
        "the second half of a 64-bit key is dropped",
        "return _signed(state & 0xFFFFFFFF), _signed(state >> 32)",
        "return _signed(state & 0xFFFFFFFF), 0",
    ),
    ("torch_fp8/quantization/options.py", "tests/torch_fp8/conversion/test_layer_options.py"): (
        "overrides are not checked against the other options",
        "        _check_override(config, pattern, options)\n",
        "        pass\n",
    ),
}
