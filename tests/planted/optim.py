"""Faults in optimizers, their states and their checkpoints."""

_TESTS = "tests/torch_fp8/optim"
FAULTS = {
    ("torch_fp8/optim/step.py", f"{_TESTS}/test_rounding_streams.py"): (
        "what user code writes is rounded with the same bits in each step",
        'keys = stream_keys(seed, -1 - int(state["step"]), index)',
        "keys = stream_keys(seed, -1, index)",
    ),
    ("torch_fp8/optim/step.py", f"{_TESTS}/test_groups.py"): (
        "all groups are stepped with the first one's learning rate",
        "(prepared[i][0], of_groups[steps[i]]) for i in chosen",
        "(prepared[i][0], of_groups[steps[0]]) for i in chosen",
    ),
    ("torch_fp8/optim/step.py", f"{_TESTS}/test_optimizer.py"): (
        "small parameters of AdamW decay as Adam's do",
        'names = "decoupled_weight_decay", "weight_decay", "eps"',
        'names = "weight_decay", "eps"',
    ),
    ("torch_fp8/optim/step.py", f"{_TESTS}/test_stable_adamw.py"): (
        "clipping raises the rate of small updates",
        "1 / rms.clamp(min=1)",
        "1 / rms",
    ),
    ("torch_fp8/optim/step.py", f"{_TESTS}/test_step.py"): (
        "the amax that a weight keeps never falls",
        "        torch._foreach_copy_(amaxes, [torch.zeros_like(amaxes[0])] * len(amaxes))\n",
        "        pass\n",
        "a kept matrix steps with a moment that was replaced",
        "same = exp_avg[0] is first() and exp_avg_sq[0] is second()",
        "same = True",
        "a kept matrix steps a weight that other code has written",
        "if last is None or halves.stepped != halves.version:",
        "if last is None:",
        "a kept matrix rounds with the number that its weight had before",
        "others: Any = (*matrix[5:-1], number)",
        "others: Any = matrix[5:]",
        "an interrupted step leaves what was known of the weight before",
        "halves.version = version  # before the kernels: a step may be interrupted",
        "pass",
    ),
    ("torch_fp8/quantization/stochastic_rounding.py", f"{_TESTS}/test_rounding_streams.py"): (
        "weights of all seeds and steps round alike",
        "    state = stream_state(*counters, after=after)",
        "    state = stream_state(*counters)",
    ),
    ("torch_fp8/kernels/adamw.py", "tests/torch_fp8/kernels/test_adamw_compiled.py"): (
        "the alignment of one tensor decides for all of a matrix",
        "        self.address_bits |= tensor.data_ptr()",
        "        self.address_bits = tensor.data_ptr()",
        "a kept table rounds with the keys of the step before",
        '_numbers("Q", [s.stream for s in scalars])',
        '_numbers("Q", [0 for s in scalars])',
        "all groups are stepped with the numbers of the first one",
        "[numbers[i] for i in map(id, scalars)]",
        "[numbers[id(scalars[0])]] * len(scalars)",
    ),
    ("torch_fp8/optim/gradient_slot.py", f"{_TESTS}/test_grad_hooks.py"): (
        "an optimizer that takes over a gradient loses its exchange",
        "        slot._optimizer = weakref.ref(optimizer)\n",
        "        slot._optimizer, slot.exchange = weakref.ref(optimizer), None\n",
    ),
    ("torch_fp8/tensor/wide_grad.py", "tests/torch_fp8/tensor/test_wide_grad.py"): (
        "a write to a zero gradient is no term of a sum",
        "vars(self.stored).pop(_ZERO, None)  # the version does not show this write\n",
        "pass\n",
    ),
    ("torch_fp8/optim/gradient_slot.py", f"{_TESTS}/test_release.py"): (
        "a gradient that GradScaler has scaled is applied as it is",
        'if hasattr(optimizer, "found_inf"):',
        "if False:",
        "a backward that builds a graph steps with one",
        "            with torch.no_grad():\n                return self(parameter)\n",
        "            pass\n",
        "the backward after zero_grad steps a weight again",
        "if parameter in optimizer.fp8_released:",
        "if False:",
    ),
    ("torch_fp8/optim/gradient_slot.py", f"{_TESTS}/test_rounding_streams.py"): (
        "8-bit gradients of all shards round alike",
        "return Rounding(self._counters, row * row_length + col, rank)",
        "return Rounding(self._counters, 0, rank)",
    ),
    ("torch_fp8/optim/gradient_slot.py", "tests/torch_fp8/tensor/test_parametrizations.py"): (
        "an 8-bit gradient has a weak reference to its weight, which torch then cannot swap",
        "        is_sharded = isinstance(parameter, DTensor)\n        row",
        (
            "        is_sharded = isinstance(parameter, DTensor)\n"
            "        self.known = weakref.ref(parameter)\n        row"
        ),
    ),
    ("torch_fp8/optim/muon.py", f"{_TESTS}/test_muon.py"): (
        "shards of Muon are stepped without nesterov",
        'update = grad.lerp(buffer, beta) if group["nesterov"] else buffer',
        "update = buffer",
    ),
    ("torch_fp8/optim/muon.py", "tests/torch_fp8/distributed/fsdp/test_muon.py"): (
        "a gradient of zeros makes a shard's weight NaN",
        """y / y.norm().clamp(min=group["eps"])""",
        "y / y.norm()",
    ),
    ("torch_fp8/optim/muon.py", f"{_TESTS}/test_state_forms.py"): (
        "the momentum of an unsplit weight stays float32",
        "    if not is_large(parameter) or momentum.shape != parameter.shape:\n        return\n",
        (
            "    if not hasattr(parameter, 'halves') or momentum.shape != parameter.shape:\n"
            "        return\n"
        ),
    ),
    ("torch_fp8/optim/state.py", f"{_TESTS}/test_state_forms.py"): (
        "a step count that is no tensor is loaded as zero",
        'torch.as_tensor(entry["step"], dtype=torch.float32, device="cpu")',
        'torch.zeros((), dtype=torch.float32, device="cpu")',
    ),
    ("torch_fp8/optim/residual.py", f"{_TESTS}/test_state_forms.py"): (
        "a whole residual gives all shards the first rows",
        "    return part_of(parameter, saved.contiguous().view(torch.int8).view(rows, -1))",
        "    return saved.contiguous().view(torch.int8).view(rows, -1)[: len(local(parameter))]",
    ),
    ("torch_fp8/optim/residual.py", "tests/test_old_files.py"): (
        "residuals of 4 bits pass for residuals of 8",
        "    if bits == 4:\n",
        "    if bits == 3:\n",
    ),
    ("torch_fp8/optim/optimizer.py", f"{_TESTS}/test_checkpoint.py {_TESTS}/test_optimizer.py"): (
        "a loaded seed is ignored",
        'self.fp8_config = dataclasses.replace(self.fp8_config, seed=options["seed"])',
        "pass",
    ),
    ("torch_fp8/optim/kept_payloads.py", "tests/torch_fp8/optim/test_kept_payloads.py"): (
        "each rank decides by its own memory whether weights keep their payloads",
        'return answer_of_one(repr(("payloads", payloads, later)), lambda: answer) == "keep"',
        'return answer == "keep"',
        "weights that nothing steps keep payloads",
        "isinstance(weight, SplitWeight) and weight in stepped",
        "isinstance(weight, SplitWeight)",
        "whether payloads fit is decided again",
        "if optimizer.fp8_payloads is None and casts:",
        "if casts:",
    ),
    ("torch_fp8/quantization/linear_int8.py", "tests/torch_fp8/optim/test_muon.py"): (
        "the thresholds of a momentum's elements differ alike for ever",
        "stream_keys(seed, step // _EPOCH, parameter)",
        "stream_keys(seed, 0, parameter)",
    ),
    ("torch_fp8/optim/merged_state.py", "tests/torch_fp8/optim/test_merged_state.py"): (
        "a tied weight is joined once for each of its names",
        "if isinstance(value, nn.Parameter) and value not in joined:",
        "if isinstance(value, nn.Parameter):",
    ),
    ("torch_fp8/optim/checkpoint.py", "tests/test_old_files.py"): (
        "moments of 4 bits are taken for a stock state",
        "    if formats != STATE_FORMATS:\n",
        "    if not formats:\n",
    ),
}
