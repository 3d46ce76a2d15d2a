"""`Monitor`: measures every N-th step, raises alarms, and runs the configured fallbacks.

How it works
============

Torch's own hooks on the optimizer's step show where a step ends. After the step before a measured
one, the monitor makes the layers show their GEMMs' operands (`torch_fp8.monitor.observer`). Before
the update of the measured step, when all gradients exist, it reads histories and updates
(`torch_fp8.monitor.parameters`), detaches from the layers, joins the numbers of all ranks, and
fetches them with one synchronization. All other steps run as without a monitor.

The monitor never stops a run: an error in it becomes one warning with the reason, and the numbers
that it could not measure are missing.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_fp8.config import FP8Config, config_or_default
from torch_fp8.monitor.alarm import DEFAULT_BOUNDS, Bound, Crossing, Losses, crossings, layer_of
from torch_fp8.monitor.events import Events
from torch_fp8.monitor.expert_observer import EXPERTS, ExpertModules
from torch_fp8.monitor.fallback import Fallback
from torch_fp8.monitor.layer_observer import INPUT, guarded
from torch_fp8.monitor.observer import Observer, hook_step
from torch_fp8.monitor.parameters import (
    fp8_layers,
    gated_mlps,
    kinds_of,
    look_at_gated_mlps,
    look_at_histories,
    look_at_saturation,
    look_at_updates,
)
from torch_fp8.monitor.run_log import RunLog
from torch_fp8.monitor.series import PREFIX, Series
from torch_fp8.nn.class_swap import without_compiler
from torch_fp8.nn.layer_filter import output_layer
from torch_fp8.ops.one_rank import in_several_ranks
from torch_fp8.quantization.argument_types import check_arguments

_REPORTED = 100
"""The interval at which consecutive spikes are reported after the first one."""


class Monitor:
    """Collects statistics of a model's FP8 layers while it trains, and acts on alarms.

    Args:
        model: the converted model, not wrapped.
        optimizers: the model's optimizer, or several; the one with the most elements shows where a
            step ends.
        config: the configuration, with ``monitor`` and the options that belong to it.
        folder: the folder in which rank zero writes `fp8_monitor.jsonl`, or None for no file.
        log: a function called on every rank with a dict from name to number, and the step.
        say: a function called on every rank with the text of an event.
        ddp: a function that returns the DistributedDataParallel around the model, or None if there
            is none.
        bounds: the bounds of the alarm.
        name: the model's name if a run trains several; part of messages and of the file's name.
    Raises:
        TypeError: `config` is not an `FP8Config`.
        ValueError: ``monitor`` is 0, there is no optimizer, or the configured fallback is not
            available.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Iterable[Optimizer],
        config: FP8Config,
        *,
        folder: str | Path | None = None,
        log: Callable[[dict[str, float], int], None] | None = None,
        say: Callable[[str], None] | None = None,
        ddp: Callable[[], nn.Module | None] = lambda: None,
        bounds: tuple[Bound, ...] = DEFAULT_BOUNDS,
        name: str = "",
    ) -> None:
        config = config_or_default(config)
        check_arguments(Monitor.__init__, locals(), "Monitor")
        if not config.monitor:
            raise ValueError("FP8Config(monitor=0) measures nothing; set monitor=100, for example")
        self.config, self.bounds, self.name = config, bounds, name
        self._log, self._ddp = log, ddp
        self._events = Events(name, say)
        self._is_joining = False
        single = isinstance(optimizers, Optimizer)
        self._optimizers: list[Optimizer] = [optimizers] if single else list(optimizers)
        if not self._optimizers:
            raise ValueError("a monitor needs an optimizer to detect the end of a step; pass one")
        self._layers = fp8_layers(model)
        self._mlps = gated_mlps(model)
        self._experts = ExpertModules(model)
        self._weights: list[tuple[str, Any]] = [*self._layers, *self._experts.weights]
        kinds = kinds_of(self._layers, self._mlps, config.monitor_probes)
        self.series = Series(kinds | self._experts.kinds())
        self.fallback = Fallback(self._layers, self._mlps, config)
        head = output_layer(model) or getattr(model, "lm_head", None)
        self._observer = Observer(
            self._layers,
            self._experts,
            clip_search="clip_search" in config.monitor_probes,
            head=head if "logit_sharpness" in config.monitor_probes else None,
            failed=self._events.failed,
        )
        self._eager = any(
            getattr(module, "_compiled_call_impl", None) or without_compiler(module) is not module
            for module in model.modules()
        )
        self._losses = Losses()
        self._reported: dict[str, Tensor] = {}
        self._spiked_at = 0
        self._measuring = False
        if folder is not None and (not in_several_ranks() or dist.get_rank() == 0):
            names = ("monitor", "on_alarm", "recipe", *("smooth_swiglu",) * config.smooth_swiglu)
            shown = {name: getattr(config, name) for name in names}
            self._events.file = RunLog(Path(folder), self.series.names, shown, name)
        self._handles = hook_step(self._optimizers, self._before_update, self._after_update)
        self._begin()

    @property
    def step(self) -> int:
        """The number of the last finished step."""
        return self._events.step

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events so far, as dicts with ``step``, ``event``, ``layer`` and a text, ``what``."""
        return self._events.happened

    @property
    def of_model(self) -> str:
        """A phrase that separates this monitor's messages from those of the run's other models."""
        return self._events.of_model

    def observe_loss(self, loss: Any) -> None:
        """Add the loss of a backward; several losses in one step are added up, as gradients are."""
        with guarded(self._events.failed):
            self._losses.add(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in JSON types."""
        state = {"step": self.step, "losses": list(self._losses.spikes.losses)}
        return state | self.fallback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`."""
        if not state:
            return
        self._observer.remove()
        self._reported.clear()  # the histories have changed
        self._events.step = int(state["step"])
        self._losses.go_on(state["losses"])
        self.fallback.load_state_dict(state)
        self._losses.forget()
        if self._events.file is not None:
            self._events.file.since = self.step
        if self.fallback.fallen:
            names = ", ".join(self.fallback.fallen)
            self._events.tell(f"FP8 monitor: still out of FP8 at step {self.step}: {names}")
        self._begin()

    def summary(self) -> str:
        """Return one sentence on the events so far."""
        return self._events.summary(self.fallback.fallen)

    def close(self) -> None:
        """Stop measuring; layers that have fallen back run FP8 again. The file remains."""
        self._observer.remove()
        self._experts.remove()
        for handle in self._handles:
            handle.remove()
        self.flush()
        self.fallback.undo()

    def flush(self) -> None:
        """Write the losses since the last measured step; all ranks call it together."""
        with guarded(self._events.failed):
            self._measure_losses()
            if self._losses.fetched:
                self._events.write(self.step, (), None, self._losses.taken())

    # ---- the course of a step --------------------------------------------------------------------

    def _begin(self) -> None:
        """Observe the layers if the step that begins is a measured one."""
        if self._joins():
            self._measuring = False
            return
        self._measuring = (self.step + 1) % self.config.monitor == 0
        if self._measuring:
            with guarded(self._events.failed):
                self._observer.install(eager=self._eager)

    def _joins(self) -> bool:
        """Return whether ranks may run out of inputs, so that not all can join numbers."""
        config = getattr(self._ddp(), "_join_config", None)
        if getattr(config, "enable", False) and not self._is_joining:
            self._is_joining = True
            warnings.warn(
                f"the FP8 monitor measures nothing from step {self.step + 1} on: within "
                "DistributedDataParallel.join() (join_uneven_inputs) ranks finish one by one, so "
                "their numbers cannot be combined",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._is_joining

    def _before_update(self) -> None:
        """Measure, judge and act between the last backward of a step and its update."""
        step = self.step + 1
        self._losses.end_step(step, self._device)
        if self._joins():
            self._observer.remove()
            self._losses.forget()
            return
        # A failure on one rank must not keep it from the collectives that all ranks run.
        if self._measuring:
            self._measure_losses()
            series = self._measure()
            with guarded(self._events.failed):
                self._judge(step, series)

    def _after_update(self) -> None:
        self._events.step += 1
        self._begin()

    @torch.no_grad()
    def _measure(self) -> dict[str, float]:
        seen = self._observer.seen
        self._observer.remove()
        if not any(place.endswith(f"/{INPUT}") for place in seen) and self._layers:
            self._notice_compiled()
        parts: tuple[Callable[[], Iterable[tuple[str, Tensor]]], ...] = (
            lambda: look_at_histories(self._layers, self._reported),
            lambda: look_at_saturation(self._layers, self._reported),
            lambda: look_at_updates(self._weights, self._optimizers),
            lambda: look_at_gated_mlps(self._mlps),
            lambda: self._experts.look_at_tokens(self._device),
        )
        for part in parts:
            with guarded(self._events.failed):
                seen.update(part())
        self._measuring = False
        vector = self.series.vector({}, self._device)
        with guarded(self._events.failed):
            vector = self.series.vector(seen, self._device)
        pairs = zip(self.series.names, self.series.joined(vector), strict=True)
        return {name: value for name, value in pairs if not math.isnan(value)}

    def _measure_losses(self) -> None:
        """Fetch the losses since the last time, and report the first of consecutive spikes."""
        for step, loss, spikes in self._losses.fetch():
            self._spiked_at = step if spikes else self._spiked_at
            if spikes == 1 or (spikes and spikes % _REPORTED == 0):
                more = f", as are the {spikes - 1} before it" if spikes > 1 else ""
                what = f"the loss of step {step} is {loss:.4g}, far above the last ones{more}"
                self._events.note(step, {"event": "loss_spike", "layer": "", "what": what})

    def _judge(self, step: int, series: dict[str, float]) -> None:
        crossed = crossings(series, self.bounds)
        count = len(crossed) + (self._spiked_at == step)
        series = {**series, f"{PREFIX}alarm": float(count)}
        if self._losses.fetched:
            series[f"{PREFIX}loss"] = self._losses.fetched[-1][1]
        self._events.note_crossings(step, crossed, self.config.monitor)
        self._events.note_left_out(step, series, self.config.monitor)
        self._note_empty(step, crossed)
        for event in self.fallback.judge(step, crossed):
            self._events.note(step, event)
        with guarded(self._events.failed):
            self._events.write(step, self.series.names, series, self._losses.taken())
        if self._log is not None:
            prefix = f"{PREFIX}{self.name}/" if self.name else PREFIX
            self._log({prefix + n.removeprefix(PREFIX): v for n, v in series.items()}, step)

    def _note_empty(self, step: int, crossed: list[Crossing]) -> None:
        """Report which experts had no token, in the modules for which an alarm was raised."""
        alarmed = {layer_of(c.name) for c in crossed if c.bound.kind == EXPERTS}
        for layer, empty in self._experts.empty() if alarmed else ():
            if layer in alarmed:
                since = max(step - self.config.monitor, 0)
                what = f"no token since step {since} for experts {empty} of {layer or EXPERTS!r}"
                self._events.note(step, {"event": "empty_experts", "layer": layer, "what": what})

    @property
    def _device(self) -> torch.device:
        """Return the model's current device."""
        devices = (owner.weight.device for _, owner in self._weights)
        return next(devices, torch.device("cpu"))

    def _notice_compiled(self) -> None:
        if not self._eager:
            self._eager = True  # no layer was observed: the whole model is compiled
            what = "probably because the model is compiled; measured steps run eagerly from now on"
            self._events.tell(f"FP8 monitor: no layer was seen in step {self.step + 1}, {what}")
