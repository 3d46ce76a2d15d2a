"""Faults in ``torch-fp8 compare``."""

_PACKAGE, _TESTS = "torch_fp8_tools/compare", "tests/torch_fp8_tools/compare"
_RUNS, _FIGURES = f"{_TESTS}/test_compare.py", f"{_TESTS}/test_figures_of_a_comparison.py"
_LAUNCHERS = f"{_TESTS}/test_launchers.py"
FAULTS = {
    (
        f"{_PACKAGE}/trial_record.py",
        f"{_FIGURES}::test_steps_to_equal_loss_follow_from_the_slope",
    ): (
        "a variant with a higher loss needs fewer steps",
        "last + statistics.fmean(gaps) / -slope",
        "last + statistics.fmean(gaps) / slope",
    ),
    (
        f"{_PACKAGE}/trial_record.py",
        f"{_FIGURES}::test_other_weights_other_batches_and_compiled_steps_are_told",
    ): (
        "a step in which a graph was compiled counts",
        ' and row["graphs"] == graphs',
        "",
    ),
    (
        f"{_PACKAGE}/step_profile.py",
        f"{_FIGURES}::test_on_a_card_kernels_count_and_the_rest_is_waiting_for_the_host",
    ): (
        "a card that waits for the loader waits for the host",
        'times["data loading"] += loading\n        times[WAITING] += idle - loading',
        "times[WAITING] += idle",
    ),
    (f"{_PACKAGE}/outcome.py", f"{_FIGURES}::test_the_advice_says_what_was_measured"): (
        "a loss that is 1 % higher is good",
        "apart.is_certain and apart.mean > WORSE",
        "apart.is_certain and apart.mean > 10 * WORSE",
    ),
    (
        f"{_PACKAGE}/outcome.py",
        f"{_FIGURES}::test_other_weights_other_batches_and_compiled_steps_are_told",
    ): (
        "other start weights are not told",
        "abs(second / first - 1) > _SAME_WEIGHTS",
        "abs(second / first - 1) > 1",
    ),
    (f"{_PACKAGE}/outcome.py", f"{_FIGURES}::test_seeds_that_change_nothing_are_named"): (
        "trials that are equal count as seeds",
        "*_equal_seeds(reference), ",
        "",
    ),
    (f"{_PACKAGE}/recorder.py", f"{_FIGURES}::test_batches_are_told_apart_by_their_content"): (
        "batches with the same shape are the same",
        "batch.detach().flatten()[:4096]",
        "batch.detach().flatten()[:0]",
    ),
    (f"{_PACKAGE}/recorder.py", f"{_LAUNCHERS}::test_a_launcher_of_notebooks"): (
        "ranks that a launcher forks end without their last line",
        'Finalize(None, self._end, ("program",), exitpriority=0)',
        "pass",
    ),
    (
        f"{_PACKAGE}/recorder.py",
        f"{_LAUNCHERS}::test_a_training_in_a_thread_as_rays_workers_start_it",
    ): (
        "a training in a thread is not recorded",
        "        if self._depth:\n            return",
        (
            "        import threading\n\n"
            "        if threading.current_thread() is not threading.main_thread():\n"
            "            return"
        ),
    ),
    (
        f"{_PACKAGE}/recorder.py",
        f"{_RUNS}::test_a_program_that_cannot_be_compared_is_named_with_the_way_out",
    ): (
        "a program without a host fails in FP8 alone",
        "        if not self.hosts:",
        "        if not self.hosts and not self.trial.is_bf16:",
    ),
    (f"{_PACKAGE}/child.py", f"{_RUNS}::test_noise_is_measured_and_seeds_shift_the_programs_own"): (
        "all seeds are the program's own",
        "given = (seed + shift) % 2**32 if isinstance(seed, int) else seed",
        "given = seed",
    ),
    (f"{_PACKAGE}/child.py", f"{_RUNS}::test_bf16_products_are_torchs_own_unless_asked"): (
        "every trial computes BF16 products in float32",
        "    if trial.fast_cpu:",
        "    if trial:",
    ),
    (
        f"{_PACKAGE}/host_precision.py",
        f"{_RUNS}::test_a_program_runs_in_both_precisions_whatever_it_says",
    ): (
        "a loop's own conversion runs in the BF16 trial",
        "    if not recorder().trial.is_bf16:\n        report",
        "    if recorder().trial:\n        report",
    ),
    (f"{_PACKAGE}/redirection.py", f"{_RUNS}::test_a_trial_leaves_the_users_outputs_alone"): (
        "a Lightning program saves where it wants",
        'wrap(cls, "save_checkpoint", _nothing("a checkpoint of the Trainer"))',
        "pass",
    ),
    (f"{_PACKAGE}/redirection.py", f"{_RUNS}::test_what_a_program_writes_by_itself_is_named"): (
        "files that a program opens by itself are not named",
        'set(mode) & set("wax+")',
        'set(mode) & set("q")',
    ),
    (
        f"{_PACKAGE}/trials.py",
        f"{_RUNS}::test_a_variant_that_fails_is_a_row_and_a_second_call_continues",
    ): (
        "a failed trial is not run again",
        'if same and result["status"] == "done":',
        "if same:",
        "a launcher's own error stands for the program's",
        "tail = _tail(folder / EXCEPTION)",
        "tail = []",
    ),
    (
        f"{_PACKAGE}/trials.py",
        f"{_RUNS}::test_ctrl_c_ends_all_processes_and_keeps_what_was_measured",
    ): (
        "processes in other sessions are left running",
        'Path("/proc").glob("[0-9]*")',
        'Path("/proc").glob("none")',
    ),
    (f"{_PACKAGE}/trials.py", f"{_RUNS}::test_bf16_products_are_torchs_own_unless_asked"): (
        "only BF16 computes its products in float32",
        "variant.options, fast_cpu)",
        "variant.options, fast_cpu and variant.options is None)",
    ),
    (
        f"{_PACKAGE}/tables.py",
        f"{_RUNS}::test_a_slow_loader_and_a_worse_loss_are_found_and_layers_in_bf16_are_named",
    ): (
        "times of an emulation are called times of a GPU",
        'if result.device == "cpu":\n        lines.append(EMULATED)',
        'if result.device == "mps":\n        lines.append(EMULATED)',
    ),
    (f"{_PACKAGE}/comparison.py", f"{_LAUNCHERS}::test_commands_of_one_machine_and_of_several"): (
        "machines write into one folder",
        'if count not in (None, "1", "1:1"):',
        'if count == "0":',
    ),
}
