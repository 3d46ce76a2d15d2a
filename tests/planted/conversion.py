"""Faults in what is converted, and in what a report says."""

from tests.planted.fault import Fault

_TESTS = "tests/torch_fp8/conversion"
FAULTS = [
    Fault(
        "a gated MLP may give its layers other inputs than its own",
        "torch_fp8/conversion/detect_gated_mlp.py",
        "is_input = [value is x for _, value in on_input]",
        "is_input = [True for _ in on_input]",
        f"{_TESTS}/test_detect_gated_mlp.py",
    ),
    Fault(
        "a trial with float32 stands for code that asks for a dtype",
        "torch_fp8/conversion/detect_gated_mlp.py",
        'if func.__name__ == "__get__" and',
        "if not func and",
        f"{_TESTS}/test_detect_gated_mlp.py",
    ),
    Fault(
        "any product is linear in up",
        "torch_fp8/conversion/detect_gated_mlp.py",
        "torch.ones_like(u)) * u) and not _is(",
        "torch.ones_like(u)) * u) or not _is(",
        f"{_TESTS}/test_detect_gated_mlp.py",
    ),
    Fault(
        "a trial calls the layers of the module itself",
        "torch_fp8/nn/trial_reads.py",
        '{**self._own, "_modules": {}, **twins}',
        "{**self._own, **twins}",
        f"{_TESTS}/test_detect_gated_mlp.py",
    ),
    Fault(
        "of two patterns the earlier one wins",
        "torch_fp8/conversion/layer_options.py",
        "options = {} if is_high_precision(given) else {**options, **given}",
        "options = {} if is_high_precision(given) else {**given, **options}",
        f"{_TESTS}/test_layer_options.py",
    ),
    Fault(
        "the first pattern says whether a layer is in high precision",
        "torch_fp8/conversion/layer_options.py",
        "if matching and is_high_precision(config.overrides[matching[-1]]):",
        "if matching and is_high_precision(config.overrides[matching[0]]):",
        f"{_TESTS}/test_layer_options.py",
    ),
    Fault(
        "adapters are converted beside their base",
        "torch_fp8/conversion/selection.py",
        "    kept_high |= dict.fromkeys(adapter_modules(model), ADAPTER)\n",
        "",
        f"{_TESTS}/test_selection.py tests/accelerate_fp8/test_adapters.py",
    ),
    Fault(
        "a wide norm is not found, for float16 rounds its small results twice",
        "torch_fp8/conversion/detect_rms_norm.py",
        "x = x.sign() * x.abs().clamp(2.0**-4) * scale",
        "x = x * scale",
        "tests/torch_fp8/nn/test_trial_reads.py",
    ),
    Fault(
        "a history with a NaN is loaded",
        "torch_fp8/conversion/revert.py",
        "        if key.endswith(_SCALING[0]) and not state[key].isfinite().all():",
        "        if False:",
        f"{_TESTS}/test_scaling_state.py tests/torch_fp8/nn/test_delayed_layers.py",
    ),
    Fault(
        "the gradient of a frozen weight counts as a product",
        "torch_fp8/conversion/report.py",
        "            total += (2 + trained) * numel",
        "            total += 3 * numel",
        f"{_TESTS}/test_report.py {_TESTS}/test_convert.py",
    ),
    Fault(
        "experts count with all of them, not with those of a token",
        "torch_fp8/conversion/report.py",
        "        yield parameter.numel() * share, ",
        "        yield parameter.numel() * 1.0, ",
        f"{_TESTS} tests/torch_fp8/test_mixture_of_experts.py",
    ),
    Fault(
        "the last steps begin a step early",
        "torch_fp8/conversion/forward_precision.py",
        "self.steps, self.first = steps, steps - max(1, round(share * steps))",
        "self.steps, self.first = steps, steps - 1 - max(1, round(share * steps))",
        "tests/torch_fp8/nn/test_bf16_forward.py",
    ),
    Fault(
        "the last steps never begin",
        "torch_fp8/conversion/forward_precision.py",
        "step >= self.first, self._model()",
        "step > self.steps, self._model()",
        "tests/torch_fp8/nn/test_bf16_forward.py",
    ),
    Fault(
        "a share of unknown steps is ignored",
        "torch_fp8/conversion/convert.py",
        '    refuse_share(config, "convert_to_float8")\n',
        "",
        "tests/torch_fp8/nn/test_bf16_forward.py",
    ),
    Fault(
        "conversion forgets the buffers that the user keeps from broadcasts",
        "torch_fp8/conversion/revert.py",
        "model, [*others, *sorted(ours)]",
        "model, [*sorted(ours)]",
        "tests/torch_fp8/conversion/test_scaling_state.py",
    ),
    Fault(
        "a gradient of a weight that is not split stays in 8 bits after revert",
        "torch_fp8/conversion/revert.py",
        "            parameter.grad = plain(parameter.grad)\n",
        "            pass\n",
        "tests/torch_fp8/conversion/test_revert.py",
    ),
]
