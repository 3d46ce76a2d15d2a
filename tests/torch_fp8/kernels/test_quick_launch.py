"""Launches that are remembered: the binary that Triton would take, with the arguments of now."""

import inspect
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from tests.internals import _MOST, Recording, quick, quick_launch


@pytest.fixture
def launches(monkeypatch):
    """A kernel with what Triton was asked for, and what its binaries were called with.

    `hooked` has what they were called with by Triton's way, which makes metadata for hooks.
    """
    asked, called, hooked = [], [], []

    class Binary:
        packed_metadata = "packed"

        def __init__(self, number):
            self.function = number

        def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
            assert (stream, packed, metadata, enter, leave) == ("of None", "packed", *[None] * 3)
            called.append((function, (x, y, z), args))

        def __getitem__(self, grid):
            return lambda *args: hooked.append((self.function, grid, args))

    active = SimpleNamespace(get_current_stream="of {}".format)
    monkeypatch.setattr(quick_launch, "driver", SimpleNamespace(active=active))

    def run(self, *args, grid, warmup, **how):
        asked.append((grid, args, how))
        return Binary(len(asked))

    monkeypatch.setattr(JITFunction, "run", run)

    @quick
    @triton.jit
    def kernel(x_ptr, y_ptr, size, factor, FLAG: tl.constexpr):
        pass

    return SimpleNamespace(kernel=kernel, asked=asked, called=called, hooked=hooked)


class _OnAnotherCard(torch.Tensor):
    def get_device(self):
        return 1


X, Y = torch.zeros(32), torch.zeros(32, dtype=torch.bfloat16)
PLAIN = {"grid": (3,), "x": X, "y": Y, "size": 32, "factor": 0.5, "flag": True, "warps": 4}


def _launch(kernel, **changed):
    now = PLAIN | changed
    arguments = (now["x"], now["y"], now["size"], now["factor"])
    kernel[now["grid"]](*arguments, FLAG=now["flag"], num_warps=now["warps"])


def test_same_launch_with_other_tensors_and_floats_asks_triton_once(launches):
    _launch(launches.kernel)
    other = torch.ones(32)
    _launch(launches.kernel, x=other, factor=0.25)
    assert len(launches.asked) == 1
    ((binary, grid, args),) = launches.called
    assert (binary, grid) == (1, (3, 1, 1))
    assert (args[0] is other, args[1] is Y) == (True, True)
    assert args[2:] == (32, 0.25, True)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": X.bfloat16()},
        {"x": X[1:]},  # not aligned
        {"size": 31},
        {"size": 1},
        {"factor": 2},  # an integer
        {"flag": False},
        {"warps": 8},
        {"grid": (4,)},
        {"x": torch.zeros(32).as_subclass(_OnAnotherCard)},
    ],
    ids=["dtype", "address", "integer", "one", "type", "constant", "option", "grid", "device"],
)
def test_what_may_need_another_binary_asks_triton(launches, changed):
    _launch(launches.kernel)
    _launch(launches.kernel, **changed)
    assert len(launches.asked) == 2
    _launch(launches.kernel, **changed)
    assert len(launches.asked) == 2
    assert launches.called[-1][0] == 2


def test_changing_numbers_ask_triton_once_and_are_on_no_tape(launches):
    @partial(quick, changing=2)
    @triton.jit(do_not_specialize=["key0", "key1"])
    def kernel(x_ptr, size, key0, key1, FLAG: tl.constexpr):
        pass

    for size, *keys in ((32, 5, 6), (32, 16, -1), (31, 16, -1)):
        with Recording([X]) as seen:
            kernel[(1,)](X, size, *keys, FLAG=True)
        assert seen.tape(X) is None
    assert [args[1] for _, args, _ in launches.asked] == [32, 31]
    ((_, _, args),) = launches.called
    assert args[1:] == (32, 16, -1, True)


def test_hooks_of_triton_see_each_launch(launches):
    launches.kernel.add_pre_run_hook(lambda *args, **kwargs: None)
    _launch(launches.kernel)
    _launch(launches.kernel)
    assert len(launches.asked) == 2


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("in_chain", [False, True])
def test_hooks_of_launches_see_remembered_ones(launches, monkeypatch, name, in_chain):
    """As Triton calls them: `HookChain.add`, or a function in the place of the chain."""
    hook = triton.knobs.HookChain() if in_chain else print
    _launch(launches.kernel)
    monkeypatch.setattr(triton.knobs.runtime, name, hook)
    if in_chain:
        _launch(launches.kernel)
        assert len(launches.called) == 1
        hook.add(print)
    launches.called.clear()
    _launch(launches.kernel)
    assert launches.called == []
    assert launches.hooked == [(1, (3, 1, 1), (X, Y, 32, 0.5, True))]


def test_triton_launches_as_these_launches_do():
    """The arguments of a binary are Triton's own, of the release that is installed."""
    source = inspect.getsource(triton.compiler.CompiledKernel.__getitem__)
    (call,) = re.findall(r"self\.run\((.*?)\)\n", source, re.DOTALL)
    assert [each.strip().split(".")[-1] for each in call.split(",")] == [
        *("grid[0]", "grid[1]", "grid[2]", "stream", "function", "packed_metadata"),
        *("launch_metadata", "launch_enter_hook", "launch_exit_hook", "*args"),
    ]


def test_with_the_switch_triton_makes_each_launch(launches, monkeypatch):
    monkeypatch.setattr(quick_launch, "REPLAYS", False)

    @triton.jit
    def kernel(x_ptr, y_ptr, size, factor, FLAG: tl.constexpr):
        pass

    quick(kernel)
    for _ in range(3):
        _launch(kernel)
    assert len(launches.asked) == 3
    assert launches.called == []


def test_launches_of_ever_new_sizes_do_not_add_up(launches):
    for size in range(2, _MOST + 10):
        _launch(launches.kernel, size=size)
    assert len(launches.kernel.launches) < 10


def test_a_recording_is_told_of_first_launches_and_of_remembered_ones(launches, monkeypatch):
    told = []
    monkeypatch.setattr(Recording, "launched", lambda self, *launch: told.append(launch))
    with Recording([X]):
        _launch(launches.kernel)
        _launch(launches.kernel, factor=0.25)
    for (kernel, args, (run, constants)), factor in zip(told, (0.5, 0.25), strict=True):
        assert kernel is launches.kernel
        assert args[2:] == (32, factor)
        run(*args, *constants)
        assert launches.called[-1] == (1, (3, 1, 1), (X, Y, 32, factor, True))
