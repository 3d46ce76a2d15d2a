"""`StepProfile`: a few steps under torch.profiler, and where their time went.

The time between two marks (a DataLoader's next batch, backward, an optimizer's step) belongs to
one part of a step. On a card, a kernel's time counts toward the part that launched it, and the time
in which the card is idle counts as waiting for the host.
"""

import gc
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_fp8_tools.compare.recorder import BACKWARD

PARTS = ("data loading", "between steps", "forward", "backward", "optimizer", "communication")
WAITING = "waiting for the host"
_LOADER, _STEP = "enumerate(DataLoader)#", "Optimizer.step#"
_LAYERS = ("aten::linear", "aten::embedding", "aten::conv", "aten::addmm", "aten::mm", "torch_fp8")
_COLLECTIVES = ("nccl", "c10d::", "gloo:")


@dataclass(frozen=True)
class Event:
    """An operator or mark of the main thread: name, times in microseconds, and its kernels' time.

    Attributes:
        name: name that the profiler gives.
        start, end: times.
        kernels: (name, microseconds) of the kernels that it launched.
    """

    name: str
    start: float
    end: float
    kernels: tuple[tuple[str, float], ...] = ()


class StepProfile:
    """Profiles from its creation to `stop`.

    Args:
        parameters: the trained parameters, whose gradients are not counted as held memory.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._gradients = [p.grad.data_ptr() for p in parameters if p.grad is not None]
        self._parameters = parameters
        self._held = held_bytes({*self._gradients})
        activities = [ProfilerActivity.CPU]
        self._on_card = torch.cuda.is_initialized()
        if self._on_card:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, profile_memory=not self._on_card)
        self._profile.start()

    def stop(self) -> dict[str, Any]:
        """Return the shares of the time by part, and on a CPU the peak of memory in bytes."""
        stay = {p.grad.data_ptr(): p.grad.nbytes for p in self._parameters if p.grad is not None}
        self._profile.stop()
        result: dict[str, Any] = {"shares": shares(self._events(), self._on_card)}
        if not self._on_card:
            persistent = sum(stay[key] for key in {*self._gradients} & stay.keys())
            result["peak"] = self._held + persistent + self._most_allocated()
        return result

    def _events(self) -> list[Event]:
        events = self._profile.events() or []
        marks = [e.thread for e in events if e.name.startswith(_STEP)]
        thread = marks[0] if marks else None
        return [
            Event(
                e.name,
                e.time_range.start,
                e.time_range.end,
                tuple((k.name, float(k.duration)) for k in e.kernels),
            )
            for e in events
            if e.device_type == torch.autograd.DeviceType.CPU
            and (e.thread == thread or e.kernels or e.name.startswith(_COLLECTIVES))
        ]

    def _most_allocated(self) -> int:
        """Return the most bytes that were allocated at once since the profile began."""
        results = self._profile.profiler.kineto_results.events()
        rows = sorted((e.start_ns(), e.nbytes()) for e in results if e.name() == "[memory]")
        most = current = 0
        for _, size in rows:
            current += size
            most = max(most, current)
        return most


def shares(events: Iterable[Event], on_card: bool) -> dict[str, float]:
    """Return the share of the time of each part, from the first to the last optimizer step.

    Args:
        events: the events of the main thread, and those with kernels or collectives.
        on_card: whether kernels are counted, instead of the host's time.
    """
    ordered = sorted(events, key=lambda e: (e.start, -e.end))
    segments = list(_segments(ordered))
    if not segments:
        return {}
    total = segments[-1][1] - segments[0][0]
    times = dict.fromkeys((*PARTS, WAITING), 0.0)
    collectives = [e for e in ordered if e.name.startswith(_COLLECTIVES) and not e.kernels]
    if not on_card:
        for start, end, part in segments:
            times[part] += end - start
        spent = sum(e.end - e.start for e in collectives if e.name.startswith("c10d::"))
        spent = min(spent, times["backward"] + times["optimizer"])
        for part in ("backward", "optimizer"):
            taken = min(times[part], spent - times["communication"])
            times[part] -= taken
            times["communication"] += taken
    else:
        for event in ordered:
            place = next((p for s, e, p in segments if s <= event.start < e), "")
            for name, duration in event.kernels if place else ():
                times["communication" if "nccl" in name.lower() else place] += duration
        idle = max(0.0, total - sum(times.values()))
        loading = min(idle, sum(e - s for s, e, part in segments if part == "data loading"))
        times["data loading"] += loading
        times[WAITING] += idle - loading
    whole = sum(times.values()) or 1.0
    return {part: time / whole for part, time in times.items() if time}


def _segments(events: Sequence[Event]) -> Iterable[tuple[float, float, str]]:
    """Yield (start, end, part) of the time between the marks of the main thread."""
    marks: list[tuple[float, str, str]] = []
    for event in events:
        kind = "loader" if event.name.startswith(_LOADER) else ""
        kind = kind or ("backward" if event.name == BACKWARD else "")
        kind = kind or ("step" if event.name.startswith(_STEP) else "")
        if kind:
            marks += [(event.start, kind, "begins"), (event.end, kind, "ends")]
    marks.sort()
    layers = [e.start for e in events if e.name.startswith(_LAYERS)]
    for (start, kind, edge), (end, following, other) in itertools.pairwise(marks):
        if (kind, edge) == ("loader", "begins"):
            yield start, end, "data loading"
        elif (kind, edge) == ("backward", "begins"):
            yield start, end, "backward"
        elif (following, other) == ("backward", "begins"):
            first = next((t for t in layers if start <= t < end), start)
            yield start, first, "between steps"
            yield first, end, "forward"
        elif following == "step":
            yield start, end, "optimizer"
        else:
            yield start, end, "between steps"


def held_bytes(left_out: set[int]) -> int:
    """Return the bytes of all tensors that Python can see on the CPU.

    Args:
        left_out: addresses of the storages that do not count.
    """
    sizes: dict[int, int] = {}
    for tensor in gc.get_objects():
        if not issubclass(type(tensor), Tensor) or hasattr(tensor, "__tensor_flatten__"):
            continue
        try:
            if tensor.device.type == "cpu" and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        except Exception:  # a fake or functional tensor has no storage
            continue
    return sum(size for address, size in sizes.items() if address and address not in left_out)
