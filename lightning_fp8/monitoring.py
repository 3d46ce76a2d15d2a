"""The engine's monitor under Lightning: where its numbers go, and how it goes back to a checkpoint.

They go to the Trainer's loggers at the number of the step, and to its ``callback_metrics``; the
files to ``trainer.log_dir``. Fabric tells its plugins of no logger and no folder: there the plugin
measures, warns and takes the ways back, and `torch_fp8.Monitor` takes a folder and ``log=
fabric.log_dict`` by hand.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, ClassVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from torch_fp8 import FP8Config
from torch_fp8.monitor.monitor import Monitor


class MonitoredPrecision:
    """The part of the plugins that watches what the model's FP8 layers do while it trains."""

    config: FP8Config
    info: ClassVar[Any]
    _monitors: list[tuple[ReferenceType[nn.Module], Monitor]] = []  # noqa: RUF012, replaced
    _monitor_state: dict[str, Any] = {}  # noqa: RUF012, replaced

    def watch_with(self, options: dict[str, Any]) -> None:
        """Change the monitor's options of the configuration, before a model is watched."""
        self.config = dataclasses.replace(self.config, **options)

    def watch(self, module: nn.Module | None, optimizers: Iterable[Any], trainer: Any) -> None:
        """Watch a model from now on, once its optimizers are known; again is harmless.

        Args:
            module: converted.
            optimizers: the model's optimizers.
            trainer: the model's Trainer; None under Fabric.
        Raises:
            ValueError: see `Monitor`.
        """
        known = any(reference() is module for reference, _ in self._monitors)
        trained = list(optimizers)
        if module is None or known or not (self.config.monitor and trained):
            return
        options: dict[str, Any] = {"say": self.info}
        where = (
            "to no logger, because Fabric does not pass loggers to plugins (see docs/monitoring.md)"
        )
        if trainer is not None:
            folder = trainer.log_dir
            options |= {
                "folder": folder,
                "log": functools.partial(_log, ref(trainer)),
                "restore": functools.partial(_restore, ref(trainer)),
            }
            where = (
                "to loggers only, because there is no log_dir" if folder is None else f"in {folder}"
            )
        monitor = Monitor(module, trained, self.config, **options)
        self.info(f"FP8 monitor: every {self.config.monitor} steps, {where}")
        monitor.load_state_dict(self._monitor_state)
        self._monitors = [*self._monitors, (ref(module), monitor)]

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Show the loss to the monitor, and run the host's hook."""
        for _, monitor in self._monitors:
            if not monitor.step:
                _count_from(monitor, getattr(module, "_trainer", None))
            monitor.observe_loss(tensor)
        return super().pre_backward(tensor, module)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the plugin's state, with the monitor's, which all ranks have alike."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        if self._monitors:
            state["monitor"] = self._monitors[0][1].state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, into models that are watched or will be."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._monitor_state = dict(state_dict.get("monitor", {}))
        for _, monitor in self._monitors:
            monitor.load_state_dict(self._monitor_state)

    def teardown(self) -> None:
        """Stop watching, and leave what the plugin leaves; a later fit goes on from there."""
        for _, monitor in self._monitors:
            self._monitor_state = monitor.state_dict()
            self.info(monitor.summary())
            monitor.close()
        self._monitors = []
        super().teardown()  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_monitors": []}  # type: ignore[misc]


def _count_from(monitor: Monitor, trainer: Any) -> None:
    """Count on from the Trainer's step where its checkpoint has no monitor's state."""
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


def _restore(trainer: Any) -> str | None:
    """Load the last checkpoint that the Trainer's callbacks have written."""
    host = trainer()
    saved = [getattr(c, "_last_checkpoint_saved", "") for c in host.checkpoint_callbacks]
    path = next((str(path) for path in reversed(saved) if path), None)
    if path is None:
        return None
    checkpoint = host.strategy.load_checkpoint(path)
    host.strategy.load_model_state_dict(checkpoint)
    host.strategy.load_optimizer_state_dict(checkpoint)
    plugin = host.precision_plugin
    plugin.load_state_dict(checkpoint.get(type(plugin).__qualname__, {}))
    return path


class FP8Monitor:
    """The callback that turns the monitor on: ``Trainer(callbacks=[FP8Monitor()])``.

    ``FP8Config(monitor=N)`` does the same; where both say something, this one holds.

    Args:
        every_n_steps: how often to measure.
        options: further fields of FP8Config, as ``on_alarm="bf16"``.
    Raises:
        ValueError: a value that is not valid; or, when the fit begins, a Trainer without FP8.
    """

    def __init__(self, every_n_steps: int = 100, **options: Any) -> None:
        super().__init__()
        FP8Config(monitor=every_n_steps, **options)  # checked now
        self.options = {"monitor": every_n_steps, **options}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Hand the choice to the precision plugin, before it sees a model."""
        watch_with = getattr(trainer.precision_plugin, "watch_with", None)
        if watch_with is None:
            raise ValueError(
                "FP8Monitor measures FP8 layers, but this Trainer has none: use "
                "Trainer(precision='fp8-mixed')"
            )
        watch_with(self.options)


@functools.cache
def callback_class() -> type:
    """Return `FP8Monitor` as a callback of each Lightning that is imported, or can be."""
    packages = ("lightning.pytorch", "pytorch_lightning")
    imported = [name for name in packages if name in sys.modules]
    for name in packages if not imported else ():
        try:
            import_module(name)
        except ImportError:
            continue
        imported.append(name)
        break
    if not imported:
        raise ImportError("FP8Monitor is a callback for Lightning's Trainer: pip install lightning")
    bases = tuple(import_module(name).Callback for name in imported)
    own = {"__module__": "lightning_fp8", "__doc__": FP8Monitor.__doc__}
    return type("FP8Monitor", (FP8Monitor, *bases), own)
