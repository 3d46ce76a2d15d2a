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
        "tests/torch_fp8_tools/plan/test_loops.py::test_extrapolated_bytes_are_those_of_whole_steps",
    ): (
        "the highest moment of a short step is continued as that of a long one",
        "        alike = len({*map(len, first)}) == 1\n",
        "        alike = False\n",
        "extrapolated bytes grow with the sequence alone",
        "bend = third - 2 * second + first",
        "bend = 0",
    ),
    (
        "torch_fp8_tools/plan/counts.py",
        f"{_TESTS}/plan/test_loops.py::test_loops_over_chunks_are_counted",
    ): (
        "loops over chunks are extrapolated from less than a chunk",
        "if steps[0].calls == steps[1].calls:",
        "if False:",
    ),
    (
        "torch_fp8_tools/plan/counts.py",
        f"{_TESTS}/plan/test_loops.py::test_layouts_that_are_planned",
    ): (
        "a model of few layers that cannot run is no reason to run all",
        "if len(few) == len(places):",
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
        "torch_fp8_tools/plan/followed_step.py",
        f"{_TESTS}/plan/test_loops.py::test_layers_that_a_model_runs_again_are_no_loop_over_tokens",
    ): (
        "layers that run again in a step count as one loop over tokens",
        "            self._begin_block()\n            if hidden",
        "            if hidden",
    ),
    (
        "torch_fp8_tools/plan/known_results.py",
        f"{_TESTS}/plan/test_plan.py::test_known_results_are_those_of_the_operators",
    ): (
        "a known result of a step has the dtype of the operator's first tensor",
        "results = tuple([empty(first, *layout) for layout in layouts])",
        "results = tuple([empty(first, *layout[:2], first.dtype) for layout in layouts])",
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
        "torch_fp8_tools/plan/kernel_functions.py",
        f"{_TESTS}/plan/test_loops.py::test_functions_with_kernels_are_followed_once",
    ): (
        "the backward of a function that is followed once has no peak",
        "        step.add_call(*known.backward)\n",
        "",
        "functions with kernels are followed at each call",
        "if key is not None and key not in _known:",
        "if key is not None:",
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
