"""Faults in what Lightning, Accelerate, transformers and TRL are told."""

from tests.planted.fault import Fault

_ACCELERATE, _LIGHTNING = "tests/accelerate_fp8", "tests/lightning_fp8"
FAULTS = [
    Fault(
        "a token whose experts are given in part is replayed whole",
        "accelerate_fp8/routing.py",
        "replayed = (given >= 0).all(1, keepdim=True)  # (T, 1)",
        "replayed = (given >= 0).any(1, keepdim=True)  # (T, 1)",
        f"{_ACCELERATE}/test_routing.py",
    ),
    Fault(
        "the histories of a second model are loaded from the first one's",
        "accelerate_fp8/history.py",
        '        prefix = f"{i}."\n        own',
        '        prefix = "0."\n        own',
        f"{_ACCELERATE}/test_checkpoints.py",
    ),
    Fault(
        "a file of histories from an earlier run stays in the folder",
        "accelerate_fp8/history.py",
        "        path.unlink(missing_ok=True)  # left by an earlier run in the same folder\n",
        "",
        f"{_ACCELERATE}/test_checkpoints.py",
    ),
    Fault(
        "tokens of tools count in the difference of log-probabilities",
        "accelerate_fp8/rollouts.py",
        "return mask if of_tools is None else mask * of_tools",
        "return mask",
        f"{_ACCELERATE}/test_rollouts.py",
    ),
    Fault(
        "an unknown log-probability counts as a difference of zero",
        "accelerate_fp8/logprob_difference.py",
        "        real = mask.bool() & delta.isfinite()\n",
        "        real = mask.bool()\n        delta = delta.nan_to_num(0.0)\n",
        f"{_ACCELERATE}/test_rollouts.py",
    ),
    Fault(
        "vLLM keeps returning log-probabilities after our call",
        "accelerate_fp8/rollouts.py",
        "        generation.logprobs = None\n        del vars(generation)",
        "        del vars(generation)",
        f"{_ACCELERATE}/test_engine_sync.py",
    ),
    Fault(
        "a second monitor of a resumed run gets the first one's state",
        "lightning_fp8/monitoring.py",
        "        for state in self._monitor_states[len(self._monitors) :][:1]:",
        "        for state in self._monitor_states[:1]:",
        f"{_LIGHTNING}/test_monitoring.py",
    ),
    Fault(
        "a monitor without a state of its own begins at step 0 of a resumed run",
        "lightning_fp8/monitoring.py",
        '        monitor.load_state_dict({**monitor.state_dict(), "step": step})',
        "        pass",
        f"{_LIGHTNING}/test_monitoring.py",
    ),
    Fault(
        "manual optimization does not average over ranks",
        "lightning_fp8/trainer.py",
        "                connection.prepare(ddp, (), tensor)",
        "                pass",
        f"{_LIGHTNING}/test_data_parallel.py",
    ),
    Fault(
        "a Trainer's last steps stay in FP8",
        "lightning_fp8/trainer.py",
        "        if self._last_steps is not None:\n",
        "        if False:\n",
        f"{_LIGHTNING}/test_last_steps.py",
    ),
    Fault(
        "a loop of one's own ignores the share of its last steps",
        "accelerate_fp8/accelerator.py",
        "    preparation.refuse_share()\n",
        "",
        f"{_ACCELERATE}/test_last_steps.py",
    ),
    Fault(
        "transformers' last steps begin one step late",
        "accelerate_fp8/trainer_callback.py",
        "self._last_steps.before(state.global_step)",
        "self._last_steps.before(state.global_step - 1)",
        f"{_ACCELERATE}/test_last_steps.py",
    ),
]
