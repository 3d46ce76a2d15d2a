"""Recordings of an operator's allocations and launches, which later calls replay.

A launcher chooses kernels, tiles, warps and outputs in Python. It chooses the same ones whenever
shapes and options are the same, as in every step and for every generated token. `Replayed`
therefore records the allocations and launches of one call and repeats them in later calls with
their tensors. To measure the host time without replay, run ``TORCH_FP8_REPLAY=0 python -m
benchmarks.evidence.host_time``.

The recording is observed, not declared: a torch dispatch mode sees every operator that the launcher
calls, and `torch_fp8.kernels.quick_launch` reports every launch. If a launcher does anything else
with its tensors, such as reading an element, it is called every time instead.

Set ``TORCH_FP8_REPLAY=0`` in the environment to turn off both the replay and the remembered
launches of `quick_launch`, for example to debug a fault on a GPU.
"""

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_aten: Any = torch.ops.aten
_ALLOCATE = {_aten.new_empty.default, _aten.empty.memory_format, _aten.empty_like.default}
_DETACH = _aten.detach.default
"""A dispatch mode sees this operator after allocations; it returns the same tensor."""
_METHODS = {
    _aten.view.default: Tensor.view,
    _aten.view.dtype: Tensor.view,
    _aten.t.default: Tensor.t,
    _aten.new_zeros.default: Tensor.new_zeros,
    _aten.select.int: Tensor.select,
    _aten.sum.dim_IntList: Tensor.sum,
}
"""Operators, and methods that do the same with less host time."""
_SAME_ADDRESS = {_aten.view.default, _aten.view.dtype, _aten._unsafe_view.default, _aten.t.default}
_SAME_ADDRESS.add(_DETACH)
"""Views that start at their base's address, so a kernel can take either."""
_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype})
"""Types of a launcher's arguments other than tensors."""
_SINGLE = _VALUES | {Tensor, nn.Parameter}
"""The usual types of arguments that are not tuples."""
_active = threading.local()
"""Holds the `recording` of this thread."""
_every: weakref.WeakSet["Replayed"] = weakref.WeakSet()
_MOST = 512
"""Calls remembered per operator, a bound for runs whose token counts never repeat."""


def _replays() -> bool:
    value = os.environ.get("TORCH_FP8_REPLAY", "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(
            f"TORCH_FP8_REPLAY is {value!r}: set 0 to let Triton prepare every launch, or 1 (the "
            "default) to repeat recorded launches"
        )
    return value != "0"


REPLAYS = _replays()
"""Whether this process replays calls and remembers launches."""


class Tape(NamedTuple):
    """The recorded steps of a call.

    Attributes:
        constants: first values; the call's tensors follow, then steps' results (launches: None).
        steps: launches, allocations and other operator calls in the order of execution: the index
            of a step's result, the function that performs it, and one that picks its arguments from
            the values so far.
        results: function that picks the call's result from the values.
        hooks: Triton's lists of the kernels' hooks; the tape isn't replayed if one is not empty.
        no_hooks: an empty list for each of `hooks`, with which these are compared.
    """

    constants: list[Any]
    steps: list[tuple[int, Callable[..., Any], Callable[[list[Any]], tuple[Any, ...]]]]
    results: Callable[[list[Any]], Any]
    hooks: list[list[Any]]
    no_hooks: list[list[Any]]

    def play(self, tensors: list[Tensor]) -> Any:
        """Repeat the recorded call with `tensors`, which are on the current device."""
        values = [*self.constants, *tensors, *self.steps]  # a result takes its step's place
        for i, run, choose in self.steps:
            values[i] = run(*choose(values))
        return self.results(values)


class _Event(NamedTuple):
    """A launch of `kernel`, or the operator call that returned the tensor `result`."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    result: Tensor | None = None
    kernel: Any = None


class Recording(TorchDispatchMode):
    """Dispatch mode that records what a launcher does with its tensors.

    Args:
        tensors: tensors among the launcher's arguments.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        # If one tensor is passed twice, the tape cannot tell which argument a step uses.
        self._fits = len({id(t) for t in tensors}) == len(tensors)
        self._events: list[_Event] = []
        self._on_demand: dict[int, _Event] = {}
        """Allocations and views by id of their tensor; a tape has only those that it needs."""

    def __enter__(self) -> Any:
        self._outer, _active.recording = recording(), self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _active.recording = self._outer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        others = [*(x for x in args if not isinstance(x, Tensor)), *kwargs.values()]
        if (
            not isinstance(result, Tensor)
            or func._schema.is_mutable
            or not _DATA_DEPENDENT.isdisjoint(func.tags)
            or any(isinstance(y, Tensor) for x in others for y in (x if type(x) is list else [x]))
        ):
            self._fits = False
        elif func in _ALLOCATE:
            factory = {"dtype": result.dtype, "device": result.device}
            again = functools.partial(torch.empty_strided, result.shape, result.stride(), **factory)
            self._on_demand[id(result)] = _Event(again, (), result)
        elif func in _SAME_ADDRESS and not kwargs:
            self._on_demand[id(result)] = _Event(func, args, result)
        else:
            run = functools.partial(_METHODS.get(func, func), **kwargs)
            self._events.append(_Event(run, args, result))
        return result

    def launched(self, kernel: Any, args: Sequence[Any], runner: Any) -> None:
        """Record a launch.

        Args:
            kernel: Triton kernel that was launched.
            args: tensors and numbers of the launch.
            runner: function that runs the binary, and the constants that follow `args`, or None if
                the binary is not known.
        """
        if runner is None:
            self._fits = False
        else:
            run, constants = runner
            bases = [self._base(x) for x in args]
            self._events.append(_Event(run, (*bases, *constants), None, kernel))

    def _base(self, x: Any) -> Any:
        """Return the base tensor that starts at the address of x."""
        while id(x) in self._on_demand and self._on_demand[id(x)].run in _SAME_ADDRESS:
            x = self._on_demand[id(x)].args[0]
        return x

    def tape(self, result: Any) -> Tape | None:
        """Return the tape of a call that returned `result`, or None if it cannot be replayed."""
        several = type(result) is tuple
        results = result if several else (result,)
        if not self._fits or not all(x is None or isinstance(x, Tensor) for x in results):
            return None
        every = [*self._events, *self._on_demand.values()]
        constants = {id(x): x for e in every for x in (None, *e.args) if not isinstance(x, Tensor)}
        self._places = {id(x): i for i, x in enumerate((*constants.values(), *self._tensors))}
        self._initial, self._steps = len(self._places), []
        try:
            for event in self._events:
                self._add(event)
            chosen = _chooser([self._place(x) for x in results], several)
        except KeyError:  # the call used a tensor from elsewhere, which is not an argument
            return None
        hooks = [e.kernel.pre_run_hooks for e in self._events if e.kernel is not None]
        return Tape([*constants.values()], self._steps, chosen, hooks, [[] for _ in hooks])

    def _place(self, x: Any) -> int:
        """Return the index of x among the values; add the step that creates it if necessary."""
        if id(x) not in self._places:
            event = self._on_demand[id(x)]
            if event.run is _DETACH:
                self._places[id(x)] = self._place(event.args[0])
            else:
                self._add(event)
        return self._places[id(x)]

    def _add(self, event: _Event) -> None:
        choose = _chooser([self._place(x) for x in event.args], True)
        place = self._initial + len(self._steps)
        if event.result is not None:
            self._places[id(event.result)] = place
        self._steps.append((place, _METHODS.get(event.run, event.run), choose))


def _chooser(places: list[int], several: bool) -> Callable[[list[Any]], Any]:
    """Return a function that picks these values from a list, as a tuple if `several`."""
    if len(places) > 1 or not several:
        return itemgetter(*places)
    return itemgetter(slice(0, 0)) if not places else lambda values: (values[places[0]],)


def recording() -> Recording | None:
    """Return the innermost recording of this thread, or None."""
    return getattr(_active, "recording", None)


class Replayed:
    """A launcher whose calls are recorded and replayed.

    A call is recorded when its shapes and options come for the second time.

    Args:
        launcher: function of tensors, None, numbers, strings, dtypes, and tuples of these, with a
            tensor first; it returns a tensor, or a tuple of tensors and None.
    """

    def __init__(self, launcher: Callable[..., Any]) -> None:
        self._launcher = launcher
        self._tapes: dict[Any, Tape | bool] = {}
        _every.add(self)

    def __call__(self, *args: Any) -> Any:
        if not REPLAYS:
            return self._launcher(*args)
        # A look at the type is faster than an isinstance check for Tensor.
        flat = [
            x
            for part in args
            for x in ((part,) if type(part) in _SINGLE or not isinstance(part, tuple) else part)
        ]
        tensors = [x for x in flat if type(x) not in _VALUES]
        device = tensors[0].device.index
        key = [
            x if type(x) in _VALUES else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15)
            for x in flat
        ]
        known = (device, *key)
        tape = self._tapes.get(known)
        if type(tape) is Tape and tape.hooks == tape.no_hooks:
            if device is None or device == torch.cuda.current_device():
                return tape.play(tensors)
            with torch.cuda.device(device):
                return tape.play(tensors)
        if tape is True:
            with Recording(tensors) as seen:
                result = self._launcher(*args)
            self._tapes[known] = seen.tape(result) or False
            return result
        if tape is None:
            if len(self._tapes) >= _MOST:
                self._tapes.clear()
            self._tapes[known] = True
        return self._launcher(*args)


def forget_recordings() -> None:
    """Forget all calls of all launchers; needed if their choices change."""
    for replayed in _every:
        replayed._tapes.clear()
