"""Faults in the command line, and faults in the engine that its self-test sees."""

_TESTS = "tests/torch_fp8_tools"
_SMOKE = f"{_TESTS}/env/test_smoke.py"
FAULTS = {
    ("torch_fp8/ops/scaled_mm.py", f"{_SMOKE}::test_a_wrong_output_of_one_token_is_told"): (
        "the output of a single token is 8 % too large",
        "    return _multiply(a, b, *options).contiguous()\n",
        (
            "    output = _multiply(a, b, *options)\n"
            "    return (output * 1.08 if len(output) == 1 else output).contiguous()\n"
        ),
    ),
    (
        "torch_fp8_tools/plan/counts.py",
        f"{_TESTS}/plan/test_loops.py::test_layouts_that_are_planned",
    ): (
        "a model of few layers that cannot run is no reason to run all",
        "if len(few) == len(places) or isinstance(error, TooManyOperators):",
        "if few:",
    ),
    ("torch_fp8/ops/quantize.py", f"{_SMOKE}::test_a_wrong_output_of_one_token_is_told"): (
        "a cast cuts off half of its range",
        "((x / scale).clamp(-format.max, format.max)",
        "((x / scale).clamp(-format.max / 2, format.max / 2)",
    ),
    ("torch_fp8/tensor/frozen_payload.py", f"{_SMOKE}::test_sizes_that_a_card_refuses_are_told"): (
        "a frozen weight is multiplied with a wrong scale",
        "return QuantizedTensor(self.qdata, self.scale, self.spec.granularity)",
        "return QuantizedTensor(self.qdata, self.scale * 1.08, self.spec.granularity)",
    ),
    ("torch_fp8_tools/env/smoke.py", f"{_SMOKE}::test_a_wrong_output_of_one_token_is_told"): (
        "the self-test runs no single token",
        "TOKENS, FEW_TOKENS = (256, 99), (16, 1)",
        "TOKENS, FEW_TOKENS = (256, 99), (16, 2)",
        "the self-test accepts any decoded token",
        "    if not sqnr >= floor:\n",
        "    if sqnr < 0:\n",
    ),
    ("torch_fp8_tools/env/smoke.py", f"{_SMOKE}::test_a_wrong_kernel_is_told"): (
        "a wrong byte of a cast is a neighbour",
        'name.startswith(("norm", "SwiGLU")))',
        "True)",
    ),
    (
        "torch_fp8_tools/env/smoke.py",
        f"{_SMOKE}::test_a_process_that_fails_turns_its_own_line_red",
    ): (
        "a process that fails is reported as well",
        "    if status == 0:\n",
        "    if status is not None:\n",
    ),
    ("torch_fp8_tools/env/smoke.py", "tests/torch_fp8_tools/env/test_smoke.py"): (
        "a compiled layer may break its graph in the self-test",
        "dynamic=False, fullgraph=True",
        "dynamic=False, fullgraph=False",
    ),
    ("torch_fp8_tools/env/hosts.py", f"{_TESTS}/env/test_hosts.py"): (
        "a module of a host that is not extended is reported as extended",
        'too_old or status.removeprefix("extended")',
        'too_old or ""',
    ),
    (
        "torch_fp8_tools/plan/plan.py",
        f"{_TESTS}/plan/test_plan.py::test_lora_holds_frozen_weights_at_a_byte",
    ): (
        "each parameter of the planned model counts one element more",
        "p.numel() for p in setup.layers.whole",
        "p.numel() + 1 for p in setup.layers.whole",
    ),
    ("torch_fp8_tools/report/report.py", f"{_TESTS}/report/test_report.py"): (
        "a bound of zero is never crossed in the report",
        "return 2.0 if value > bound.most else 0.0",
        "return 0.0",
    ),
    ("torch_fp8_tools/plan/followed_step.py", f"{_TESTS}/plan/test_sharded_plan.py"): (
        "a planned step of FSDP2 scatters no gradients",
        "name.startswith((*_GATHERS, *_SCATTERS))",
        "name.startswith(_GATHERS)",
    ),
    (
        "torch_fp8_tools/plan/models.py",
        f"{_TESTS}/plan/test_plan.py::test_a_step_saves_what_an_eager_run_saves",
    ): (
        "a plan has the mask of packed rows, whose position ids it cannot read",
        "is_mask, mask, _, *sizes = arguments_of(*args, **kwargs)\n",
        "is_mask, mask, packed, *sizes = arguments_of(*args, **kwargs)\n"
        "        return is_mask, mask if is_mask else None, packed, *sizes\n",
        "a plan has the mask of padding, whose values it cannot read",
        "return is_mask, mask if is_mask else None, None, *sizes",
        "return is_mask, mask, None, *sizes",
    ),
    (
        "torch_fp8/nn/input_group.py",
        f"{_TESTS}/plan/test_plan.py::test_a_step_saves_what_an_eager_run_saves",
    ): (
        "layers behind a dropout share no cast of a fake tensor, as they do of a real one",
        "if not is_plain(x) or x.grad_fn is None:",
        "if type(x) is not Tensor or x.grad_fn is None:",
    ),
    (
        "torch_fp8_tools/plan/layers.py",
        f"{_TESTS}/plan/test_plan.py::test_the_step_is_that_of_the_whole_model",
    ): (
        "lists that a configuration computes stay those of all layers",
        "(cls,), computed)",
        "(cls,), {})",
    ),
    (
        "torch_fp8_tools/plan/followed_step.py",
        f"{_TESTS}/plan/test_loops.py::test_a_layer_that_loops_over_a_long_sequence_is_refused",
    ): (
        "a step of any number of operators is counted",
        "if self._calls > MOST_OPERATORS:",
        "if False:",
    ),
    ("torch_fp8/monitor/monitor.py", "tests/test_architecture.py"): (
        "the engine imports its tools",
        "from torch_fp8.monitor.run_log import RunLog\n",
        (
            "from torch_fp8.monitor.run_log import *\n"
            "from torch_fp8_tools.report import run_record\n"
            "from torch_fp8.monitor.run_log import RunLog as RunLog\n"
        ),
    ),
    (
        "torch_fp8_tools/plan/memory_tracker.py",
        "tests/torch_fp8_tools/plan/test_loss_workspace.py",
    ): (
        "a plan leaves out the logits of a chunk",
        "        if func is _LOSS:\n",
        "        if False:\n",
    ),
    ("torch_fp8_tools/env/machine.py", "tests/torch_fp8_tools/test_cli.py"): (
        "logs of checks that passed are printed in place of the others",
        "if r.log and r.status == FAILED]",
        "if r.log and r.status != FAILED]",
    ),
}
