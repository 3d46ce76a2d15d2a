"""Faults in ``torch-fp8 compare``."""

from tests.planted.fault import Fault

_PACKAGE, _TESTS = "torch_fp8_tools/compare", "tests/torch_fp8_tools/compare"
_RUNS, _FIGURES = f"{_TESTS}/test_compare.py", f"{_TESTS}/test_figures_of_a_comparison.py"
_LAUNCHERS = f"{_TESTS}/test_launchers.py"
FAULTS = [
    Fault(
        "a variant with a higher loss needs fewer steps",
        f"{_PACKAGE}/trial_record.py",
        "last + statistics.fmean(gaps) / -slope",
        "last + statistics.fmean(gaps) / slope",
        f"{_FIGURES}::test_steps_to_equal_loss_follow_from_the_slope",
    ),
    Fault(
        "a card that waits for the loader waits for the host",
        f"{_PACKAGE}/step_profile.py",
        'times["data loading"] += loading\n        times[WAITING] += idle - loading',
        "times[WAITING] += idle",
        f"{_FIGURES}::test_on_a_card_kernels_count_and_the_rest_is_waiting_for_the_host",
    ),
    Fault(
        "a loss that is 1 % higher is good",
        f"{_PACKAGE}/outcome.py",
        "apart.is_certain and apart.mean > WORSE",
        "apart.is_certain and apart.mean > 10 * WORSE",
        f"{_FIGURES}::test_the_advice_says_what_was_measured",
    ),
    Fault(
        "batches with the same shape are the same",
        f"{_PACKAGE}/recorder.py",
        "batch.detach().flatten()[:4096]",
        "batch.detach().flatten()[:0]",
        f"{_FIGURES}::test_batches_are_told_apart_by_their_content",
    ),
    Fault(
        "other start weights are not told",
        f"{_PACKAGE}/outcome.py",
        "abs(second / first - 1) > _SAME_WEIGHTS",
        "abs(second / first - 1) > 1",
        f"{_FIGURES}::test_other_weights_other_batches_and_compiled_steps_are_told",
    ),
    Fault(
        "a step in which a graph was compiled counts",
        f"{_PACKAGE}/trial_record.py",
        ' and row["graphs"] == graphs',
        "",
        f"{_FIGURES}::test_other_weights_other_batches_and_compiled_steps_are_told",
    ),
    Fault(
        "all seeds are the program's own",
        f"{_PACKAGE}/child.py",
        "given = (seed + shift) % 2**32 if isinstance(seed, int) else seed",
        "given = seed",
        f"{_RUNS}::test_noise_is_measured_and_seeds_shift_the_programs_own",
    ),
    Fault(
        "a loop's own conversion runs in the BF16 trial",
        f"{_PACKAGE}/host_precision.py",
        "    if not recorder().trial.is_bf16:\n        report",
        "    if recorder().trial:\n        report",
        f"{_RUNS}::test_a_program_runs_in_both_precisions_whatever_it_says",
    ),
    Fault(
        "a Lightning program saves where it wants",
        f"{_PACKAGE}/redirection.py",
        'wrap(cls, "save_checkpoint", _nothing("a checkpoint of the Trainer"))',
        "pass",
        f"{_RUNS}::test_a_trial_leaves_the_users_outputs_alone",
    ),
    Fault(
        "a failed trial is not run again",
        f"{_PACKAGE}/trials.py",
        'if same and result["status"] == "done":',
        "if same:",
        f"{_RUNS}::test_a_variant_that_fails_is_a_row_and_a_second_call_continues",
    ),
    Fault(
        "processes in other sessions are left running",
        f"{_PACKAGE}/trials.py",
        'Path("/proc").glob("[0-9]*")',
        'Path("/proc").glob("none")',
        f"{_RUNS}::test_ctrl_c_ends_all_processes_and_keeps_what_was_measured",
    ),
    Fault(
        "times of an emulation are called times of a GPU",
        f"{_PACKAGE}/tables.py",
        'if result.device == "cpu":\n        lines.append(EMULATED)',
        'if result.device == "mps":\n        lines.append(EMULATED)',
        f"{_RUNS}::test_a_slow_loader_and_a_worse_loss_are_found_and_layers_in_bf16_are_named",
    ),
    Fault(
        "every trial computes BF16 products in float32",
        f"{_PACKAGE}/child.py",
        "    if trial.fast_cpu:",
        "    if trial:",
        f"{_RUNS}::test_bf16_products_are_torchs_own_unless_asked",
    ),
    Fault(
        "only BF16 computes its products in float32",
        f"{_PACKAGE}/trials.py",
        "variant.options, fast_cpu)",
        "variant.options, fast_cpu and variant.options is None)",
        f"{_RUNS}::test_bf16_products_are_torchs_own_unless_asked",
    ),
    Fault(
        "a launcher's own error stands for the program's",
        f"{_PACKAGE}/trials.py",
        "tail = _tail(folder / EXCEPTION)",
        "tail = []",
        f"{_RUNS}::test_a_variant_that_fails_is_a_row_and_a_second_call_continues",
    ),
    Fault(
        "machines write into one folder",
        f"{_PACKAGE}/comparison.py",
        'if count not in (None, "1", "1:1"):',
        'if count == "0":',
        f"{_LAUNCHERS}::test_commands_of_one_machine_and_of_several",
    ),
    Fault(
        "ranks that a launcher forks end without their last line",
        f"{_PACKAGE}/recorder.py",
        'Finalize(None, self._end, ("program",), exitpriority=0)',
        "pass",
        f"{_LAUNCHERS}::test_a_launcher_of_notebooks",
    ),
    Fault(
        "a training in a thread is not recorded",
        f"{_PACKAGE}/recorder.py",
        "        if self._depth:\n            return",
        "        import threading\n\n"
        "        if threading.current_thread() is not threading.main_thread():\n            return",
        f"{_LAUNCHERS}::test_a_training_in_a_thread_as_rays_workers_start_it",
    ),
    Fault(
        "trials that are equal count as seeds",
        f"{_PACKAGE}/outcome.py",
        "*_equal_seeds(reference), ",
        "",
        f"{_FIGURES}::test_seeds_that_change_nothing_are_named",
    ),
    Fault(
        "a program without a host fails in FP8 alone",
        f"{_PACKAGE}/recorder.py",
        "        if not self.hosts:",
        "        if not self.hosts and not self.trial.is_bf16:",
        f"{_RUNS}::test_a_program_that_cannot_be_compared_is_named_with_the_way_out",
    ),
    Fault(
        "files that a program opens by itself are not named",
        f"{_PACKAGE}/redirection.py",
        'set(mode) & set("wax+")',
        'set(mode) & set("q")',
        f"{_RUNS}::test_what_a_program_writes_by_itself_is_named",
    ),
]
