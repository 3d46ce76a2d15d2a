"""Faults in what is converted, and in what a report says."""

_TESTS = "tests/torch_fp8/conversion"
FAULTS = {
    ("torch_fp8/conversion/frozen_layers.py", f"{_TESTS}/test_freeze.py"): (
        "freezing a model that is not converted leaves what nothing proves frozen",
        "    meant = meant_to_freeze(model, config, every)\n",
        "    meant = meant_to_freeze(model, config)\n",
    ),
    ("torch_fp8/conversion/detect_producers.py", f"{_TESTS}/test_detect_gated_mlp.py"): (
        "a gated MLP may give its layers other inputs than its own",
        "is_input = [value is x for _, value in on_input]",
        "is_input = [True for _ in on_input]",
        "a trial with float32 stands for code that asks for a dtype",
        'if func.__name__ == "__get__" and',
        "if not func and",
        "any product is linear in up",
        "torch.ones_like(u)) * u) and not _is(",
        "torch.ones_like(u)) * u) or not _is(",
    ),
    ("torch_fp8/conversion/detect_producers.py", f"{_TESTS}/test_liger.py"): (
        "Liger Kernel's norm of any dtype is ours",
        'twin.casting_mode in ("llama", "gemma") and ',
        "",
        "a module that Liger Kernel has patched stays",
        '"forward" in vars(module) and not is_ligers(module)',
        '"forward" in vars(module)',
    ),
    ("torch_fp8/conversion/fused_layers.py", f"{_TESTS}/test_liger.py"): (
        "a module does not get Liger Kernel's forward back",
        'MethodType(vars(module).pop("ligers"), module)',
        "module.forward",
        "Liger Kernel's forward hides the one that writes FP8",
        'module.ligers = vars(module).pop("forward").__func__',
        'module.ligers = vars(module)["forward"].__func__',
    ),
    ("torch_fp8/nn/trial_reads.py", f"{_TESTS}/test_detect_gated_mlp.py"): (
        "a trial calls the layers of the module itself",
        '{**self._own, "_modules": {}, **twins}',
        "{**self._own, **twins}",
    ),
    ("torch_fp8/conversion/layer_options.py", f"{_TESTS}/test_layer_options.py"): (
        "of two patterns the earlier one wins",
        "options = {} if is_high_precision(given) else {**options, **given}",
        "options = {} if is_high_precision(given) else {**given, **options}",
        "the first pattern says whether a layer is in high precision",
        "if matching and is_high_precision(config.overrides[matching[-1]]):",
        "if matching and is_high_precision(config.overrides[matching[0]]):",
    ),
    (
        "torch_fp8/conversion/selection.py",
        f"{_TESTS}/test_selection.py tests/accelerate_fp8/test_adapters.py",
    ): (
        "adapters are converted beside their base",
        "    kept_high |= dict.fromkeys(adapter_modules(model), ADAPTER)\n",
        "",
    ),
    ("torch_fp8/conversion/detect_producers.py", "tests/torch_fp8/nn/test_trial_reads.py"): (
        "a wide norm is not found, for float16 rounds its small results twice",
        "x = x.sign() * x.abs().clamp(2.0**-4) * scale",
        "x = x * scale",
    ),
    (
        "torch_fp8/conversion/revert.py",
        f"{_TESTS}/test_scaling_state.py tests/torch_fp8/nn/test_delayed_layers.py",
    ): (
        "a history with a NaN is loaded",
        "        if key.endswith(_SCALING[0]) and not state[key].isfinite().all():",
        "        if False:",
    ),
    ("torch_fp8/conversion/revert.py", "tests/torch_fp8/conversion/test_scaling_state.py"): (
        "conversion forgets the buffers that the user keeps from broadcasts",
        "model, [*others, *ours]",
        "model, [*ours]",
    ),
    ("torch_fp8/conversion/autotune.py", f"{_TESTS}/test_autotune.py"): (
        "layers with one input run in FP8 although some are faster in BF16",
        "if _is_faster(together, recipe) and together.fp8[recipe] < mixed:",
        "if _is_faster(together, recipe):",
        "layers are timed alone only",
        "readers = [*groups, *((name,) for name in layers if not any(name in g for g in groups))]",
        "readers = [(name,) for name in layers]",
    ),
    ("torch_fp8/conversion/fused_layers.py", f"{_TESTS}/test_autotune.py"): (
        "layers behind a LayerNorm are not timed together",
        "not (_is_layer_norm(module) or find_rms_norm(module)):",
        "not find_rms_norm(module):",
    ),
    ("torch_fp8/conversion/layer_benchmark.py", f"{_TESTS}/test_layer_benchmark.py"): (
        "layers that are timed together cast their input one by one",
        "if self.recipe is not None and len(self.layers) > 1:",
        "if self.recipe is None and len(self.layers) > 1:",
        "layers that are timed together have products of their own in backward",
        "grads, InputGroup(layers) if joins else None)",
        "grads)",
    ),
    ("torch_fp8/conversion/detect_producers.py", "tests/torch_fp8/tensor/test_lazy_quantized.py"): (
        "a layer inside another module tells the size of that one's output",
        "if alone and width != 2 * layer.in_features:",
        "if width != 2 * layer.in_features:",
    ),
    ("torch_fp8/conversion/revert.py", "tests/torch_fp8/conversion/test_revert.py"): (
        "a gradient of a weight that is not split stays in 8 bits after revert",
        "        parameter.grad = plain(parameter.grad)\n",
        "        pass\n",
    ),
    ("torch_fp8/conversion/report.py", f"{_TESTS}/test_report.py {_TESTS}/test_convert.py"): (
        "the gradient of a frozen weight counts as a product",
        "            total += (2 + trained) * numel",
        "            total += 3 * numel",
    ),
    ("torch_fp8/conversion/report.py", f"{_TESTS} tests/torch_fp8/test_mixture_of_experts.py"): (
        "experts count with all of them, not with those of a token",
        "        yield parameter.numel() * share, ",
        "        yield parameter.numel() * 1.0, ",
    ),
    ("torch_fp8/conversion/forward_precision.py", "tests/torch_fp8/nn/test_bf16_forward.py"): (
        "the last steps begin a step early",
        "self.steps, self.first = steps, steps - max(1, round(share * steps))",
        "self.steps, self.first = steps, steps - 1 - max(1, round(share * steps))",
        "the last steps never begin",
        "step >= self.first, self._model()",
        "step > self.steps, self._model()",
    ),
    ("torch_fp8/conversion/convert.py", "tests/torch_fp8/nn/test_bf16_forward.py"): (
        "a share of unknown steps is ignored",
        '    refuse_share(config, "convert_to_float8")\n',
        "",
    ),
}
