"""The callbacks for a transformers Trainer; imported only if there is one."""

from typing import Any

from transformers import Trainer, TrainerCallback

from accelerate_fp8.preparation import log_visibly
from torch_fp8.conversion.forward_precision import LastSteps

_SCREEN = {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}
"""Callbacks that print; by name, because importing one of them needs IPython."""


class MonitorCallback(TrainerCallback):
    """Passes measurements to the Trainer at the end of a step, when the step's number is known."""

    def __init__(self, monitoring: Any) -> None:
        self.monitoring = monitoring

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue from the Trainer's step if its checkpoint has no monitor state."""
        self.monitoring.count_from(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the measurements of the finished step."""
        self.monitoring.to_trainer(log_silently)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the remaining losses and log a summary."""
        self.monitoring.finish()


class LastStepsCallback(TrainerCallback):
    """Runs the forward of a Trainer's last steps in BF16; see `FP8Config.bf16_last`."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._last_steps: LastSteps | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the first of the last steps."""
        self._last_steps = LastSteps(kwargs["model"], self.share, state.max_steps)
        log_visibly(str(self._last_steps))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the precision of the step's forwards."""
        assert self._last_steps is not None
        self._last_steps.before(state.global_step)


def log_silently(trainer: Any, series: dict[str, float]) -> None:
    """Log as the Trainer does, but not to the screen, where hundreds of numbers help nobody.

    It calls the class's own ``log``, because TRL's adds and clears its running means in each call.
    """
    handler, is_due = trainer.callback_handler, trainer.control.should_log
    callbacks = handler.callbacks
    handler.callbacks = [
        c for c in callbacks if _SCREEN.isdisjoint(cls.__name__ for cls in type(c).__mro__)
    ]
    try:
        Trainer.log(trainer, dict(series))
    finally:
        handler.callbacks = callbacks
        trainer.control.should_log = is_due  # the Trainer's own entry follows
