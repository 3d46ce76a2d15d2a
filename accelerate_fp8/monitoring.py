"""The engine's monitor under Accelerate and transformers: where its numbers go, and its state.

Under a Trainer the numbers go to its log: an entry in ``log_history`` after each measured step,
which the Trainer's trackers also get, but the progress bars and printed logs don't. In your own
loop they go to the Accelerator's trackers. Files go to the Trainer's ``output_dir`` or the
Accelerator's ``project_dir``.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from accelerate_fp8.optimizers import WeakKeys
from torch_fp8 import FP8Config
from torch_fp8.monitor.monitor import Monitor

_STATE = "fp8_monitor_state.json"


class Monitoring:
    """The monitors of one Accelerator's models.

    Args:
        config: the configuration, with ``monitor`` and the options that belong to it.
        say: a function that logs a line.
    Attributes:
        trainer: a weak reference to the Trainer to log to, which calls back at the end of its
            steps.
    """

    def __init__(self, config: FP8Config, say: Callable[[str], None]) -> None:
        self.config, self._say = config, say
        self._monitors: MutableMapping[nn.Module, Monitor] = WeakKeys()
        self.trainer: Callable[[], Any] = lambda: None
        self._states: list[dict[str, Any]] = []
        self._waiting: list[dict[str, float]] = []

    def __reduce__(self) -> Any:  # a copy watches nothing
        return Monitoring, (self.config, self._say)

    def attach(
        self,
        accelerator: Any,
        model: nn.Module,
        optimizers: list[Optimizer],
        ddp: Callable[[], nn.Module | None],
    ) -> None:
        """Monitor a model from now on, after its optimizers are known.

        Raises:
            ValueError: see `Monitor`.
        """
        if not (self.config.monitor and optimizers) or model in self._monitors:
            return
        trainer = self.trainer()
        folder = accelerator.project_dir if trainer is None else trainer.args.output_dir
        to_trackers = functools.partial(_to_trackers, ref(accelerator))
        others = len(self._monitors)
        monitor = self._monitors[model] = Monitor(
            model,
            optimizers,
            self.config,
            folder=folder,
            log=to_trackers if trainer is None else lambda series, _: self._waiting.append(series),
            say=self._say,
            ddp=ddp,
            name=f"model{others + 1}" if others else "",
        )
        where = f"into {folder}"
        if folder is None:
            where = "to trackers only, because Accelerator(project_dir=...) is not set"
        self._say(f"FP8 monitor{monitor.of_model}: every {self.config.monitor} steps, {where}")
        monitor.load_state_dict(self._states[others] if others < len(self._states) else {})

    @contextlib.contextmanager
    def observing(self, loss: Any, steps: int) -> Iterator[None]:
        """Pass a loss to the monitors of those models that the backward in this context trains.

        Args:
            loss: the loss before its division by the number of accumulation steps.
            steps: the number of accumulation steps.
        """
        before = {m: _gradients(m) for m in self._monitors} if len(self._monitors) > 1 else {}
        yield
        trained = [m for m in before if _gradients(m) != before[m]]
        for model in trained or self._monitors:
            self._monitors[model].observe_loss(loss.detach() / steps)

    def count_from(self, step: int) -> None:
        """Start the step count of new monitors at the host's, as its log does."""
        for monitor in self._monitors.values():
            if step and not monitor.step:
                monitor.load_state_dict({**monitor.state_dict(), "step": step})

    def to_trainer(self, log: Callable[[Any, dict[str, float]], None]) -> None:
        """Pass the measurements of the finished step to the Trainer by `log`."""
        waiting, self._waiting = self._waiting, []
        for series in waiting:
            log(self.trainer(), series)

    def finish(self) -> None:
        """Write the remaining losses and log a summary, when a Trainer has finished."""
        for monitor in self._monitors.values():
            monitor.flush()
            self._say(monitor.summary())

    def save(self, folder: str | Path, is_main_process: bool) -> None:
        """Write the monitors' state, the same on all ranks, into a checkpoint's folder."""
        states = [monitor.state_dict() for monitor in self._monitors.values()]
        if states and is_main_process:
            Path(folder).mkdir(parents=True, exist_ok=True)
            first, *others = states
            (Path(folder) / _STATE).write_text(json.dumps({**first, "others": others}))

    def load(self, folder: str | Path) -> None:
        """Load the result of `save`, also for models that are prepared later."""
        path = Path(folder) / _STATE
        if self.config.monitor and path.is_file():
            first = json.loads(path.read_text())
            self._states = [first, *first.pop("others", ())]
            for monitor, state in zip(self._monitors.values(), self._states, strict=False):
                monitor.load_state_dict(state)


def _gradients(model: nn.Module) -> list[tuple[int, int]]:
    """Return values that change when a backward adds to a model's gradients."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return [(id(grad), grad._version) for grad in grads if grad is not None]


def _to_trackers(accelerator: Any, series: dict[str, float], step: int) -> None:
    host = accelerator()
    if host is not None and host.trackers:
        host.log(series, step=step)
