"""The callback for a transformers Trainer; imported only if there is one."""

from typing import Any

from transformers import Trainer, TrainerCallback

from accelerate_fp8.preparation import log_visibly
from torch_fp8.conversion.forward_precision import LastSteps

_SCREEN = {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}
"""Callbacks that print; by name, because importing one of them needs IPython."""


class StepsCallback(TrainerCallback):
    """Passes a Trainer's steps to the engine.

    Measurements go to the Trainer at the end of a step, when the step's number is known. The
    forward of the last steps runs in BF16; see `FP8Config.bf16_last`.
    """

    def __init__(self, preparation: Any) -> None:
        self.monitoring, self.share = preparation.monitoring, preparation.config.bf16_last
        self._last_steps: LastSteps | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue from the Trainer's step, and find the first of the last steps."""
        self.monitoring.count_from(state.global_step)
        if self.share:
            self._last_steps = LastSteps(kwargs["model"], self.share, state.max_steps)
            log_visibly(str(self._last_steps))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the precision of the step's forwards."""
        if self._last_steps is not None:
            self._last_steps.before(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the measurements of the finished step."""
        self.monitoring.to_trainer(log_silently)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the remaining losses and log a summary."""
        self.monitoring.finish()


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
