"""Faults in optimizers, their states and their checkpoints."""

from tests.planted.fault import Fault

_TESTS = "tests/torch_fp8/optim"
FAULTS = [
    Fault(
        "what user code writes is rounded with the same bits in each step",
        "torch_fp8/optim/step.py",
        'keys = stream_keys(seed, -1 - int(state["step"]), index)',
        "keys = stream_keys(seed, -1, index)",
        f"{_TESTS}/test_rounding_streams.py",
    ),
    Fault(
        "weights of all seeds and steps round alike",
        "torch_fp8/quantization/stochastic_rounding.py",
        "    state = stream_state(*counters, after=after)",
        "    state = stream_state(*counters)",
        f"{_TESTS}/test_rounding_streams.py",
    ),
    Fault(
        "all groups are stepped with the first one's learning rate",
        "torch_fp8/optim/step.py",
        "shared, stream = of_groups[id(group), step]",
        "shared, stream = next(iter(of_groups.values()))",
        f"{_TESTS}/test_groups.py",
    ),
    Fault(
        "the alignment of one tensor decides for all of a matrix",
        "torch_fp8/kernels/adamw.py",
        "        addresses |= tensor.data_ptr()",
        "        addresses = tensor.data_ptr()",
        "tests/torch_fp8/kernels/test_adamw_compiled.py",
    ),
    Fault(
        "a kept matrix steps with a moment that was replaced",
        "torch_fp8/optim/step.py",
        "same = first[0] is self.codes[0]() and second[0] is self.codes[1]()",
        "same = True",
        f"{_TESTS}/test_step.py",
    ),
    Fault(
        "a kept table rounds with the keys of the step before",
        "torch_fp8/kernels/adamw.py",
        '        places["key0"] += scalars.keys\n',
        "",
        "tests/torch_fp8/kernels/test_adamw_compiled.py",
    ),
    Fault(
        "8-bit gradients of all shards round alike",
        "torch_fp8/optim/gradient_slot.py",
        "return Rounding(self._counters, row * row_length + col, rank)",
        "return Rounding(self._counters, 0, rank)",
        f"{_TESTS}/test_rounding_streams.py",
    ),
    Fault(
        "shards of Muon are stepped without nesterov",
        "torch_fp8/optim/muon.py",
        'update = grad.lerp(buffer, beta) if group["nesterov"] else buffer',
        "update = buffer",
        f"{_TESTS}/test_muon.py",
    ),
    Fault(
        "a step count that is no tensor is loaded as zero",
        "torch_fp8/optim/state.py",
        'else torch.tensor(float(step), device="cpu", dtype=torch.float32)',
        'else torch.zeros((), device="cpu", dtype=torch.float32)',
        f"{_TESTS}/test_state_forms.py",
    ),
    Fault(
        "the momentum of an unsplit weight stays float32",
        "torch_fp8/optim/muon.py",
        "    if not is_large(parameter) or momentum.shape != parameter.shape:\n        return\n",
        "    if not hasattr(parameter, 'halves') or momentum.shape != parameter.shape:\n"
        "        return\n",
        f"{_TESTS}/test_state_forms.py",
    ),
    Fault(
        "a whole residual gives all shards the first rows",
        "torch_fp8/optim/residual.py",
        "    return part_of(parameter, saved.contiguous().view(torch.int8).view(rows, -1))",
        "    return saved.contiguous().view(torch.int8).view(rows, -1)[: len(local(parameter))]",
        f"{_TESTS}/test_state_forms.py",
    ),
    Fault(
        "a loaded seed is ignored",
        "torch_fp8/optim/optimizer.py",
        'self.fp8_config = dataclasses.replace(self.fp8_config, seed=options["seed"])',
        "pass",
        f"{_TESTS}/test_checkpoint.py {_TESTS}/test_optimizer.py",
    ),
    Fault(
        "each rank decides by its own memory whether weights keep their payloads",
        "torch_fp8/optim/kept_payloads.py",
        'return can_ask() and answer_of_one(repr(("payloads", payloads, later)), answer) == "keep"',
        'return can_ask() and answer() == "keep"',
        "tests/torch_fp8/optim/test_kept_payloads.py",
    ),
    Fault(
        "whether payloads fit is decided again",
        "torch_fp8/optim/kept_payloads.py",
        "if optimizer.fp8_payloads is None and casts:",
        "if casts:",
        "tests/torch_fp8/optim/test_kept_payloads.py",
    ),
    Fault(
        "the thresholds of a momentum's elements differ alike for ever",
        "torch_fp8/quantization/linear_int8.py",
        "stream_keys(seed, step // _EPOCH, parameter)",
        "stream_keys(seed, 0, parameter)",
        "tests/torch_fp8/optim/test_muon.py",
    ),
    Fault(
        "a tied weight is joined once for each of its names",
        "torch_fp8/optim/merged_state.py",
        "if isinstance(value, nn.Parameter) and value not in joined:",
        "if isinstance(value, nn.Parameter):",
        "tests/torch_fp8/optim/test_merged_state.py",
    ),
    Fault(
        "residuals of 4 bits pass for residuals of 8",
        "torch_fp8/optim/residual.py",
        "    if bits == 4:\n",
        "    if bits == 3:\n",
        "tests/test_old_files.py",
    ),
    Fault(
        "moments of 4 bits are taken for a stock state",
        "torch_fp8/optim/checkpoint.py",
        "    if formats != STATE_FORMATS:\n",
        "    if not formats:\n",
        "tests/test_old_files.py",
    ),
]
