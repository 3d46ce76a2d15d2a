"""Faults in what Lightning, Accelerate, transformers and TRL are told."""

_ACCELERATE, _LIGHTNING = "tests/accelerate_fp8", "tests/lightning_fp8"
FAULTS = {
    ("accelerate_fp8/history.py", f"{_ACCELERATE}/test_checkpoints.py"): (
        "the histories of a second model are loaded from the first one's",
        '        prefix = f"{i}."\n        own',
        '        prefix = "0."\n        own',
        "a file of histories from an earlier run stays in the folder",
        "        path.unlink(missing_ok=True)  # left by an earlier run in the same folder\n",
        "",
    ),
    ("accelerate_fp8/rollouts.py", f"{_ACCELERATE}/test_rollouts.py"): (
        "tokens of tools count in the difference of log-probabilities",
        "return mask if of_tools is None else mask * of_tools",
        "return mask",
        "log-probabilities that we have measured change TRL's loss",
        '        output.pop("sampling_per_token_logps", None)',
        "        pass",
    ),
    ("accelerate_fp8/logprob_difference.py", f"{_ACCELERATE}/test_rollouts.py"): (
        "an unknown log-probability counts as a difference of zero",
        "        real = mask.bool() & delta.isfinite()\n",
        "        real = mask.bool()\n        delta = delta.nan_to_num(0.0)\n",
    ),
    ("lightning_fp8/monitoring.py", f"{_LIGHTNING}/test_monitoring.py"): (
        "a second monitor of a resumed run gets the first one's state",
        "        for state in self._monitor_states[len(self._monitors) :][:1]:",
        "        for state in self._monitor_states[:1]:",
        "a monitor without a state of its own begins at step 0 of a resumed run",
        '        monitor.load_state_dict({**monitor.state_dict(), "step": step})',
        "        pass",
    ),
    ("lightning_fp8/trainer.py", f"{_LIGHTNING}/test_data_parallel.py"): (
        "manual optimization does not average over ranks",
        "                connection.prepare(ddp, (), tensor)",
        "                pass",
    ),
    ("lightning_fp8/trainer.py", f"{_LIGHTNING}/test_last_steps.py"): (
        "a Trainer's last steps stay in FP8",
        "        if self._last_steps is not None:\n",
        "        if False:\n",
    ),
    ("accelerate_fp8/accelerator.py", f"{_ACCELERATE}/test_last_steps.py"): (
        "a loop of one's own ignores the share of its last steps",
        "    preparation.refuse_share()\n",
        "",
    ),
    ("accelerate_fp8/trainer_callback.py", f"{_ACCELERATE}/test_last_steps.py"): (
        "transformers' last steps begin one step late",
        "self._last_steps.before(state.global_step)",
        "self._last_steps.before(state.global_step - 1)",
    ),
}
