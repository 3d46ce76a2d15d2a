"""The engine's monitor under Lightning: where its numbers go, and its state.

The numbers go to the Trainer's loggers under the number of the step, and to its
``callback_metrics``; files go to ``trainer.log_dir``. Fabric gives its plugins no logger and no
folder. There the plugin measures, warns and runs the fallbacks. To log numbers, create a
`torch_fp8.Monitor` with a folder and ``log=fabric.log_dict``.
"""

import functools
from collections.abc import Iterable
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from torch_fp8 import FP8Config
from torch_fp8.monitor.monitor import Monitor


class MonitoredPrecision:
    """The part of the plugins that monitors the model's FP8 layers while it trains."""

    config: FP8Config
    info: ClassVar[Any]
    _monitors: dict[nn.Module, Monitor] = {}  # noqa: RUF012, replaced
    _monitor_states: list[dict[str, Any]] = []  # noqa: RUF012, replaced

    def watch(self, module: nn.Module | None, optimizers: Iterable[Any], trainer: Any) -> None:
        """Watch a model from now on, after its optimizers are known; may be called again.

        Args:
            module: the converted model.
            optimizers: the model's optimizers.
            trainer: the model's Trainer, or None under Fabric.
        Raises:
            ValueError: see `Monitor`.
        """
        trained = list(optimizers)
        if module is None or module in self._monitors or not (self.config.monitor and trained):
            return
        folder = log = None
        where = "to no logger, because Fabric passes none to its plugins (see docs/monitoring.md)"
        if trainer is not None:
            folder, log = trainer.log_dir, functools.partial(_log, ref(trainer))
            where = "to loggers only, because there is no log_dir"
        if folder is not None:
            where = f"in {folder}"
        monitor = Monitor(module, trained, self.config, folder=folder, log=log, say=self.info)
        self.info(f"FP8 monitor: every {self.config.monitor} steps, {where}")
        for state in self._monitor_states[len(self._monitors) :][:1]:
            monitor.load_state_dict(state)
        self._monitors = {**self._monitors, module: monitor}

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Pass the loss to the monitor, and run the host's hook."""
        for monitor in self._monitors.values():
            if not monitor.step:
                _count_from(monitor, getattr(module, "_trainer", None))
            monitor.observe_loss(tensor)
        return super().pre_backward(tensor, module)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the plugin's state with those of the monitors, which are the same on all ranks."""
        states = [monitor.state_dict() for monitor in self._monitors.values()]
        return super().state_dict() | ({"monitor": states} if states else {})  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict` for models that are watched, now or later."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._monitor_states = list(state_dict.get("monitor", []))
        for monitor, state in zip(self._monitors.values(), self._monitor_states, strict=False):
            monitor.load_state_dict(state)

    def teardown(self) -> None:
        """Stop watching and tear down the plugin; a later fit continues from there."""
        self._monitor_states = [monitor.state_dict() for monitor in self._monitors.values()]
        for monitor in self._monitors.values():
            self.info(monitor.summary())
            monitor.close()
        self._monitors = {}
        super().teardown()  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_monitors": {}}  # type: ignore[misc]


def _count_from(monitor: Monitor, trainer: Any) -> None:
    """Continue from the Trainer's step if its checkpoint has no monitor state."""
    step = 0 if trainer is None else trainer.global_step // max(1, len(trainer.optimizers))
    if step:
        monitor.load_state_dict({**monitor.state_dict(), "step": step})


def _log(trainer: Any, series: dict[str, float], step: int) -> None:
    host = trainer()
    if host is None:
        return
    for logger in host.loggers:
        logger.log_metrics(series, step=host.global_step)
    host.callback_metrics.update(
        {name: torch.tensor(value, dtype=torch.float32) for name, value in series.items()}
    )
