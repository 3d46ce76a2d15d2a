"""`Events`: the events of a run, and where they are reported."""

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from torch_fp8.monitor.alarm import Crossing, layer_of
from torch_fp8.monitor.layer_observer import guarded
from torch_fp8.monitor.run_log import RunLog
from torch_fp8.monitor.series import PREFIX
from torch_fp8.ops.one_rank import in_several_ranks
from torch_fp8.quantization.scaling import OUTLIER
from torch_fp8.quantization.wording import first_of

_NAMED = 5
"""The maximum number of names in a warning."""
_QUIET = 20
"""The number of measured steps without a crossing after which the same crossing is reported
again.
"""


class Events:
    """A run's events: in a list, in its file, as warnings, and in the host's log.

    Args:
        name: the model's name if a run trains several.
        say: a function called on every rank with an event's text.
    Attributes:
        happened: the events.
        file: the file of rank zero, or None.
    """

    def __init__(self, name: str, say: Callable[[str], None] | None) -> None:
        self.happened: list[dict[str, Any]] = []
        self.file: RunLog | None = None
        self.has_failed = False
        self.of_model = f" of {name}" if name else ""
        self.step = 0
        """The last finished step."""
        self._say = say
        self._warned: dict[str, int] = {}

    def note(self, step: int, event: dict[str, Any], warn: bool | None = None) -> None:
        """Store an event and report it: as a warning of rank zero, or in the host's log."""
        self.happened.append({"step": step, **event})
        with guarded(self.failed):  # an error on one rank must not stop the others
            text = f"FP8 monitor{self.of_model}, step {step}: {event['what']}"
            if warn or event["event"] == "loss_spike":
                if not in_several_ranks() or dist.get_rank() == 0:
                    warnings.warn(text, RuntimeWarning, stacklevel=2)
            else:
                self.tell(text)
            if self.file is not None and not self.has_failed:
                self.file.write(step, **event)

    def note_crossings(self, step: int, crossed: list[Crossing], every: int) -> None:
        """Report the crossings that were not reported lately.

        Args:
            step: the measured step.
            crossed: the crossings.
            every: the number of steps between measured steps.
        """
        quiet = _QUIET * every
        new = [c for c in crossed if step - self._warned.get(c.name, -quiet - 1) > quiet]
        self._warned |= {c.name: step for c in crossed}
        if new:
            what = f"{len(crossed)} bound(s) crossed, new: {first_of(new, _NAMED, '; ')}"
            self.note(step, {"event": "alarm", "layer": "", "what": what}, warn=True)

    def note_left_out(self, step: int, series: Mapping[str, float], every: int) -> None:
        """Report which amaxes the histories of delayed scaling have left out.

        Args:
            step: the measured step.
            series: its numbers by name.
            every: the number of steps between measured steps.
        """
        for name, count in series.items():
            place, _, operand = name.rpartition("/")
            if count > 0 and place.endswith("/history"):
                layer = layer_of(name)
                what = (
                    f"{name.removeprefix(PREFIX)}: delayed scaling left out {count:.0f} amax(es) "
                    f"of the {operand} since step {max(step - every, 0)}, each more than "
                    f"{OUTLIER:,.0f} times the largest of the history that set the scale"
                )
                self.note(step, {"event": "left_out", "layer": layer, "what": what})

    def write(
        self,
        step: int,
        names: Sequence[str],
        series: Mapping[str, float] | None,
        losses: list[tuple[int, float]],
    ) -> None:
        """Write a step's measurements, and losses up to it, as long as the file can be written.

        Args:
            step: the step.
            names: the names of the numbers of a measured step.
            series: the numbers by name, or None if the step was not measured.
            losses: pairs of step and loss.
        """
        if self.file is None or self.has_failed:
            return
        measured = {"values": [series.get(n, math.nan) for n in names]} if series else {}
        self.file.write(step, **measured, losses=losses)

    def tell(self, text: str) -> None:
        """Write a line to the host's log."""
        if self._say is not None:
            self._say(text)

    def failed(self, error: Exception) -> None:
        """Warn once with the reason; the run continues."""
        if not self.has_failed:
            self.has_failed = True
            warnings.warn(
                f"the FP8 monitor failed at step {self.step + 1}, and continues with what it can "
                f"measure: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def summary(self, fallen: Collection[str]) -> str:
        """Return one sentence on the events so far.

        Args:
            fallen: the layers that are out of FP8 now.
        """
        counts = dict.fromkeys(("alarm", "fallback", "return", "loss_spike"), 0)
        for event in self.happened:
            counts[event["event"]] = counts.get(event["event"], 0) + 1
        told = ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in counts.items() if n)
        more = f"; out of FP8 now: {', '.join(fallen)}" if fallen else ""
        return f"FP8 monitor{self.of_model}: {self.step} steps, {told or 'no event'}{more}"
