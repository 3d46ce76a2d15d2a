"""What an operator allocates and launches, recorded once and played again.

A launcher decides in Python which kernel runs, in which tiles, with how many warps, and what it
writes. It decides the same whenever tensors of the same shapes come with the same options, as they
do in every step and with every generated token. So `Replayed` writes down what a call allocates and
launches, and does just that in later calls, with their tensors. ``TORCH_FP8_REPLAY=0 python -m
benchmarks.evidence.host_time`` measures the host's time without it.

What is written down is seen, not told: a mode of torch's dispatcher sees all operators that the
launcher calls, and `torch_fp8.kernels.quick_launch` reports every launch. A launcher that does more
than that with its tensors, such as to read an element, is always called as it is.

``TORCH_FP8_REPLAY=0`` in the environment plays nothing, and no launch is remembered: whoever looks
for a fault on a card can leave both out.
"""

import functools
import os
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _len_torch_dispatch_stack,
)
from torch.utils._pytree import tree_leaves

_aten: Any = torch.ops.aten
_ALLOCATE = {_aten.new_empty.default, _aten.empty.memory_format, _aten.empty_like.default}
_DETACH = _aten.detach.default
"""What a mode sees behind allocations; the tensor is the same."""
_SAME_ADDRESS = {_aten.view.default, _aten.view.dtype, _aten._unsafe_view.default, _aten.t.default}
_SAME_ADDRESS.add(_DETACH)
"""Views that begin where their base begins: a kernel may be given either."""
_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_VALUES = frozenset({type(None), bool, int, float, str, torch.dtype})
"""Types of what is no tensor among a launcher's arguments."""
_MOST = 512
"""Calls that are kept of an operator: numbers of tokens that never come again shall not add up."""


def _replays() -> bool:
    value = os.environ.get("TORCH_FP8_REPLAY", "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(
            f"TORCH_FP8_REPLAY is {value!r}: 0 has Triton make each launch anew, 1 (or nothing) "
            "has launches that were made before made again"
        )
    return value != "0"


REPLAYS = _replays()
"""Whether calls are played and launches remembered in this process."""


class Step(NamedTuple):
    """A launch, an allocation or an operator.

    Attributes:
        run: does it.
        choose: takes its arguments from the values so far.
        makes: whether it returns another value.
    """

    run: Callable[..., Any]
    choose: Callable[[list[Any]], tuple[Any, ...]]
    makes: bool


class Tape(NamedTuple):
    """What a call does.

    Attributes:
        constants: the first of the values; the call's tensors are next, then what steps make.
        steps: in their order.
        results: chooses what is returned.
        hooks: the kernels' hooks, as Triton lists them; where there are any, nothing is played.
    """

    constants: list[Any]
    steps: list[Step]
    results: Callable[[list[Any]], Any]
    hooks: list[list[Any]]

    def play(self, tensors: list[Tensor]) -> Any:
        """Do with `tensors`, which are on the current device, what the recorded call has done."""
        values = self.constants + tensors
        for run, choose, makes in self.steps:
            if makes:
                values.append(run(*choose(values)))
            else:
                run(*choose(values))
        return self.results(values)


class _Event(NamedTuple):
    """A launch of `kernel`, or who made a tensor."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    made: Tensor | None = None
    kernel: Any = None


class Recording(TorchDispatchMode):
    """Sees what a launcher does with its tensors.

    Args:
        tensors: what it is given.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        # One tensor in two places would look like the other in calls where they are two.
        self._fits = len({id(t) for t in tensors}) == len(tensors)
        self._events: list[_Event] = []
        self._on_demand: dict[int, _Event] = {}
        """Allocations and views: they read no element, and are made where they are needed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        others = tree_leaves(([x for x in args if not isinstance(x, Tensor)], kwargs))
        if (
            not isinstance(made, Tensor)
            or func._schema.is_mutable
            or not _DATA_DEPENDENT.isdisjoint(func.tags)
            or any(isinstance(x, Tensor) for x in others)
        ):
            self._fits = False
        elif func in _ALLOCATE:
            how = {"dtype": made.dtype, "device": made.device}
            again = functools.partial(torch.empty_strided, made.shape, made.stride(), **how)
            self._on_demand[id(made)] = _Event(again, (), made)
        elif func in _SAME_ADDRESS and not kwargs:
            self._on_demand[id(made)] = _Event(func, args, made)
        else:
            self._events.append(_Event(functools.partial(_function(func), **kwargs), args, made))
        return made

    def launched(self, kernel: Any, args: Sequence[Any], found: Any) -> None:
        """Write down a launch.

        Args:
            kernel: a Triton kernel.
            args: tensors and numbers.
            found: who runs its binary, and the constants that follow; None: it is not known.
        """
        if found is None:
            self._fits = False
        else:
            run, constants = found
            bases = [self._base(x) for x in args]
            self._events.append(_Event(run, (*bases, *constants), None, kernel))

    def _base(self, x: Any) -> Any:
        """Return the tensor at whose address x begins."""
        while id(x) in self._on_demand and self._on_demand[id(x)].run in _SAME_ADDRESS:
            x = self._on_demand[id(x)].args[0]
        return x

    def tape(self, made: Any) -> Tape | None:
        """Return the tape of a call that has returned `made`, or None: it cannot be played."""
        several = type(made) is tuple
        results = made if several else (made,)
        if not self._fits or not all(x is None or isinstance(x, Tensor) for x in results):
            return None
        every = [*self._events, *self._on_demand.values()]
        constants = {id(x): x for e in every for x in (None, *e.args) if not isinstance(x, Tensor)}
        places = {id(x): i for i, x in enumerate((*constants.values(), *self._tensors))}
        writer = _Writer(self._on_demand, places)
        try:
            for event in self._events:
                writer.add(event)
            chosen = _chooser([writer.place(x) for x in results], several)
        except KeyError:  # a tensor that was there before the call and is none of its arguments
            return None
        hooks = [e.kernel.pre_run_hooks for e in self._events if e.kernel is not None]
        return Tape([*constants.values()], writer.steps, chosen, hooks)


class _Writer:
    """Writes the steps of a tape.

    Args:
        on_demand: who makes a tensor that no event has made, by its id.
        places: the places of the values that are there at first, by their ids.
    """

    def __init__(self, on_demand: dict[int, _Event], places: dict[int, int]) -> None:
        self._on_demand, self._places = on_demand, places
        self._next = len(places)
        self.steps: list[Step] = []

    def place(self, x: Any) -> int:
        """Return where x is among the values, from here on."""
        if id(x) not in self._places:
            event = self._on_demand[id(x)]
            if event.run is _DETACH:
                self._places[id(x)] = self.place(event.args[0])
            else:
                self.add(event)
        return self._places[id(x)]

    def add(self, event: _Event) -> None:
        choose = _chooser([self.place(x) for x in event.args], True)
        self.steps.append(Step(_function(event.run), choose, event.made is not None))
        if event.made is not None:
            self._places[id(event.made)] = self._next
            self._next += 1


def _chooser(places: list[int], several: bool) -> Callable[[list[Any]], Any]:
    """Return who takes these values from a list: as a tuple, or the only one as it is."""
    if len(places) > 1 or not several:
        return itemgetter(*places)
    return itemgetter(slice(0, 0)) if not places else lambda values: (values[places[0]],)


def _function(func: Any) -> Any:
    """Return what torch's operator calls, without its layer of Python; anything else as it is."""
    return getattr(func, "_op", func)


def recording() -> Recording | None:
    """Return the recording that goes on, if one does."""
    if not _len_torch_dispatch_stack():
        return None
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Recording) else None


class Replayed:
    """An operator's launcher, whose calls are recorded and played again.

    A call is recorded when it comes for the second time.

    Args:
        launcher: takes tensors, None, numbers, words, dtypes, and tuples of these, a tensor first;
            it returns a tensor, or a tuple of tensors and None.
    """

    def __init__(self, launcher: Callable[..., Any]) -> None:
        self._launcher = launcher
        self._tapes: dict[Any, Tape | bool] = {}

    def __call__(self, *args: Any) -> Any:
        if not REPLAYS:
            return self._launcher(*args)
        key: list[Any] = []
        tensors: list[Tensor] = []
        for argument in args:
            for x in argument if isinstance(argument, tuple) else (argument,):
                if type(x) in _VALUES:  # sooner than to ask each whether it is a tensor
                    key.append(x)
                else:
                    tensors.append(x)
                    key += x.shape, x.stride(), x.dtype, x.data_ptr() & 15
        device = tensors[0].get_device()
        key.append(device)
        known = tuple(key)
        tape = self._tapes.get(known)
        if type(tape) is Tape and not any(tape.hooks):
            if device < 0 or device == torch.cuda.current_device():
                return tape.play(tensors)
            with torch.cuda.device(device):
                return tape.play(tensors)
        if tape is True:
            return self._record(known, tensors, args)
        if tape is None:
            if len(self._tapes) >= _MOST:
                self._tapes.clear()
            self._tapes[known] = True
        return self._launcher(*args)

    def _record(self, known: tuple[Any, ...], tensors: list[Tensor], args: tuple[Any, ...]) -> Any:
        with Recording(tensors) as seen:
            made = self._launcher(*args)
        tape = seen.tape(made)
        self._tapes[known] = False if tape is None else tape
        return made

    def forget(self) -> None:
        """Forget all calls, as is due where the launcher is to decide differently."""
        self._tapes.clear()
