"""Faults in the command line, and faults in the engine that its self-test sees."""

from tests.planted.fault import Fault

_TESTS = "tests/torch_fp8_tools"
_SMOKE = f"{_TESTS}/env/test_smoke.py"
FAULTS = [
    Fault(
        "the output of a single token is 8 % too large",
        "torch_fp8/ops/scaled_mm.py",
        "    return _multiply(a, b, *options).contiguous()\n",
        "    output = _multiply(a, b, *options)\n"
        "    return (output * 1.08 if len(output) == 1 else output).contiguous()\n",
        f"{_SMOKE}::test_a_wrong_output_of_one_token_is_told",
    ),
    Fault(
        "a cast cuts off half of its range",
        "torch_fp8/ops/quantize.py",
        "((x / scale).clamp(-format.max, format.max)",
        "((x / scale).clamp(-format.max / 2, format.max / 2)",
        f"{_SMOKE}::test_a_wrong_output_of_one_token_is_told",
    ),
    Fault(
        "a frozen weight is multiplied with a wrong scale",
        "torch_fp8/tensor/frozen_payload.py",
        "return QuantizedTensor(self.qdata, self.scale, self.spec.granularity)",
        "return QuantizedTensor(self.qdata, self.scale * 1.08, self.spec.granularity)",
        f"{_SMOKE}::test_sizes_that_a_card_refuses_are_told",
    ),
    Fault(
        "the self-test runs no single token",
        "torch_fp8_tools/env/smoke.py",
        "TOKENS, FEW_TOKENS = (256, 99), (16, 1)",
        "TOKENS, FEW_TOKENS = (256, 99), (16, 2)",
        f"{_SMOKE}::test_a_wrong_output_of_one_token_is_told",
    ),
    Fault(
        "the self-test accepts any decoded token",
        "torch_fp8_tools/env/smoke.py",
        "    if not sqnr >= floor:\n",
        "    if sqnr < 0:\n",
        f"{_SMOKE}::test_a_wrong_output_of_one_token_is_told",
    ),
    Fault(
        "a wrong byte of a cast is a neighbour",
        "torch_fp8_tools/env/smoke.py",
        'name.startswith(("norm", "SwiGLU")))',
        "True)",
        f"{_SMOKE}::test_a_wrong_kernel_is_told",
    ),
    Fault(
        "a process that fails is reported as well",
        "torch_fp8_tools/env/smoke.py",
        "    if status == 0:\n",
        "    if status is not None:\n",
        f"{_SMOKE}::test_a_process_that_fails_turns_its_own_line_red",
    ),
    Fault(
        "a bound of zero is never crossed in the report",
        "torch_fp8_tools/report/report.py",
        "return 2.0 if value > bound.most else 0.0",
        "return 0.0",
        f"{_TESTS}/report/test_report.py",
    ),
    Fault(
        "a planned step of FSDP2 scatters no gradients",
        "torch_fp8_tools/plan/followed_step.py",
        "name.startswith((*_GATHERS, *_SCATTERS))",
        "name.startswith(_GATHERS)",
        f"{_TESTS}/plan/test_sharded_plan.py",
    ),
    Fault(
        "a known result of a step has the dtype of the operator's first tensor",
        "torch_fp8_tools/plan/known_results.py",
        "results = tuple([empty(first, *layout) for layout in layouts])",
        "results = tuple([empty(first, *layout[:2], first.dtype) for layout in layouts])",
        f"{_TESTS}/plan/test_plan.py::test_known_results_are_those_of_the_operators",
    ),
    Fault(
        "lists that a configuration computes stay those of all layers",
        "torch_fp8_tools/plan/layers.py",
        "(cls,), computed)",
        "(cls,), {})",
        f"{_TESTS}/plan/test_plan.py::test_the_step_is_that_of_the_whole_model",
    ),
    Fault(
        "extrapolated bytes grow with the sequence alone",
        "torch_fp8_tools/plan/steps.py",
        "bend = third - 2 * second + first",
        "bend = 0",
        f"{_TESTS}/plan/test_loops.py::test_extrapolated_bytes_are_those_of_the_whole_step",
    ),
    Fault(
        "loops over chunks are extrapolated from less than a chunk",
        "torch_fp8_tools/plan/steps.py",
        "if steps[0].calls == steps[1].calls:",
        "if False:",
        f"{_TESTS}/plan/test_loops.py::test_loops_over_chunks_are_counted",
    ),
    Fault(
        "layers that run again in a step count as one loop over tokens",
        "torch_fp8_tools/plan/followed_step.py",
        "            self._begin_block()\n            if hidden",
        "            if hidden",
        f"{_TESTS}/plan/test_loops.py::test_layers_that_a_model_runs_again_are_no_loop_over_tokens",
    ),
    Fault(
        "a model of few layers that cannot run is no reason to run all",
        "torch_fp8_tools/plan/steps.py",
        "if len(few) == len(places):",
        "if few:",
        f"{_TESTS}/plan/test_loops.py::test_layouts_that_are_planned",
    ),
    Fault(
        "a function that is followed once keeps its memory until the step ends",
        "torch_fp8_tools/plan/kernel_functions.py",
        "        step.free(held)\n",
        "",
        f"{_TESTS}/plan/test_loops.py::test_functions_with_kernels_are_followed_once",
    ),
    Fault(
        "the backward of a function that is followed once has no peak",
        "torch_fp8_tools/plan/kernel_functions.py",
        "        step.add_call(*known.backward)\n",
        "",
        f"{_TESTS}/plan/test_loops.py::test_functions_with_kernels_are_followed_once",
    ),
    Fault(
        "functions with kernels are followed at each call",
        "torch_fp8_tools/plan/kernel_functions.py",
        "if key is not None and key not in self._known:",
        "if key is not None:",
        f"{_TESTS}/plan/test_loops.py::test_functions_with_kernels_are_followed_once",
    ),
    Fault(
        "the engine imports its tools",
        "torch_fp8/monitor/monitor.py",
        "from torch_fp8.monitor.run_log import RunLog\n",
        "from torch_fp8.monitor.run_log import *\nfrom torch_fp8_tools.report import run_record\n"
        "from torch_fp8.monitor.run_log import RunLog as RunLog\n",
        "tests/test_architecture.py",
    ),
    Fault(
        "a plan leaves out the logits of a chunk",
        "torch_fp8_tools/plan/memory_tracker.py",
        "        if func is _LOSS:\n",
        "        if False:\n",
        "tests/torch_fp8_tools/plan/test_loss_workspace.py",
    ),
    Fault(
        "the highest moment of a short step is continued as that of a long one",
        "torch_fp8_tools/plan/steps.py",
        "        alike = len({*map(len, first)}) == 1\n",
        "        alike = False\n",
        "tests/torch_fp8_tools/plan/test_loops.py::test_extrapolated_bytes_are_those_of_the_whole_step",
    ),
]
