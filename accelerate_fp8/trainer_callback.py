"""What the monitor asks of a transformers Trainer; imported only where there is one."""

from typing import Any

from transformers import Trainer, TrainerCallback

_SCREEN = ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback")


class MonitorCallback(TrainerCallback):
    """Hands over, at the end of a step, what was measured in it: its number is known then."""

    def __init__(self, monitoring: Any) -> None:
        self.monitoring = monitoring

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count on from the Trainer's step where its checkpoint has no monitor's state."""
        self.monitoring.count_from(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log what was measured in the step that has ended."""
        self.monitoring.to_trainer()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what is left, and say what has happened."""
        self.monitoring.finish()


def log_silently(trainer: Any, series: dict[str, float]) -> None:
    """Log as the Trainer does, to all but the screen, on which hundreds of numbers help nobody.

    The class's own ``log``: TRL's adds and empties its running means in each call.
    """
    handler, is_due = trainer.callback_handler, trainer.control.should_log
    callbacks = handler.callbacks
    handler.callbacks = [c for c in callbacks if not _is_on_screen(c)]
    try:
        Trainer.log(trainer, dict(series))
    finally:
        handler.callbacks = callbacks
        trainer.control.should_log = is_due  # the Trainer's own entry is still to come


def load_checkpoint(trainer: Any, accelerator: Any, folder: str) -> None:
    """Load model, optimizer and schedule of a checkpoint into a Trainer that is training."""
    trainer._load_from_checkpoint(folder)
    trainer._load_optimizer_and_scheduler(folder)


def _is_on_screen(callback: Any) -> bool:
    """Whether a callback prints; by name, since one of them needs IPython to be imported."""
    return any(cls.__name__ in _SCREEN for cls in type(callback).__mro__)
