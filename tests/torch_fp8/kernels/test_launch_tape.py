"""Calls that are recorded and played: they do with other tensors what the launcher would do."""

import importlib
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack

from tests.internals import QuickKernel, Replayed, launch_tape, recording

KERNELS = Path(launch_tape.__file__).parent
OPERATORS = KERNELS.with_name("ops")


class _Kernel:
    """Stands for a kernel of Triton: a launch runs `function`, unseen, and is reported."""

    def __init__(self, function):
        self.function, self.pre_run_hooks, self.launches = function, [], 0

    def run(self, *args):
        self.launches += 1
        with _disable_current_modes():
            self.function(*args)

    def __call__(self, *args, known=True):
        self.run(*args)
        recorder = recording()
        if recorder is not None:
            recorder.launched(self, args, (self.run, ()) if known else None)


def _scaled(x, y, factor):
    y.copy_(x * factor)


scale_kernel = _Kernel(_scaled)


class _Launcher:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


def _double(x, *options):
    y = x.new_empty(x.shape)
    scale_kernel(x, y, 2.0)
    return y


def _replayed(function):
    launcher = _Launcher(function)
    return launcher, Replayed(launcher)


def _ask(replayed, *shapes, times=4, **how):
    for _ in range(times):
        tensors = [torch.randn(shape) for shape in shapes]
        made = replayed(*tensors, *how.values())
    return tensors, made


def test_with_the_switch_the_launcher_is_always_called(monkeypatch):
    monkeypatch.setattr(launch_tape, "REPLAYS", False)
    launcher, replayed = _replayed(_double)
    (x,), y = _ask(replayed, (3, 5), times=4)
    assert launcher.calls == 4
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize(("value", "replays"), [("0", False), ("1", True), ("", True)])
def test_the_switch_is_an_environment_variable(monkeypatch, value, replays):
    monkeypatch.setenv("TORCH_FP8_REPLAY", value)
    assert launch_tape._replays() is replays


def test_another_value_of_the_switch_is_refused(monkeypatch):
    monkeypatch.setenv("TORCH_FP8_REPLAY", "no")
    with pytest.raises(ValueError, match=r"REPLAY is 'no': set 0 to .*, or 1 \(the default\)"):
        launch_tape._replays()


def test_third_call_is_played_with_its_own_tensors():
    launcher, replayed = _replayed(_double)
    before = scale_kernel.launches
    outputs = []
    for calls in (1, 2, 2, 2):
        x = torch.randn(3, 5)
        outputs.append((x, replayed(x)))
        assert launcher.calls == calls
    assert scale_kernel.launches == before + 4
    for x, y in outputs:  # each in memory of its own
        assert torch.equal(y, 2 * x)


@pytest.mark.parametrize(
    "changed",
    [
        (torch.zeros(4, 9), 1),
        (torch.zeros(8, 4).t(), 1),
        (torch.zeros(4, 8, dtype=torch.float64), 1),
        (torch.zeros(33)[1:].view(4, 8), 1),  # not aligned
        (torch.zeros(4, 8), 2),
        (torch.zeros(4, 8), None),
        (torch.zeros(4, 8), torch.zeros(())),
    ],
    ids=["shape", "strides", "dtype", "address", "option", "none", "tensor"],
)
def test_what_may_decide_otherwise_is_asked_of_the_launcher(changed):
    launcher, replayed = _replayed(_double)
    for _ in range(3):
        replayed(torch.zeros(4, 8), 1)
    assert launcher.calls == 2
    replayed(*changed)
    assert launcher.calls == 3


def test_options_in_tuples_and_the_device_are_part_of_a_call():
    class OnAnotherCard(torch.Tensor):
        device = torch.device("cuda", 1)

    launcher, replayed = _replayed(lambda x, options: _double(x))
    for options in [(torch.ones(2), "a")] * 3:
        replayed(torch.ones(4), options)
    assert launcher.calls == 2
    replayed(torch.ones(4), (torch.ones(2), "b"))
    replayed(torch.ones(4).as_subclass(OnAnotherCard), (torch.ones(2), "a"))
    assert launcher.calls == 4


def test_results_may_be_views_none_and_what_was_given():
    def launcher(x, y):
        bits = x.new_empty((2, 3), dtype=torch.int32)
        scale_kernel(x.view(6), bits.view(6), 8.0)
        return bits.view(torch.float32), None, y, bits.t(), bits.detach()

    counted, replayed = _replayed(launcher)
    (x, y), (floats, nothing, given, turned, same) = _ask(replayed, (2, 3), (4,))
    assert counted.calls == 2
    assert (nothing, given is y) == (None, True)
    expected = (x * 8).int()
    assert torch.equal(floats.view(torch.int32), expected)
    assert torch.equal(turned, expected.t())
    assert torch.equal(same, expected)
    assert turned.data_ptr() == floats.data_ptr() == same.data_ptr()


def test_operators_keep_their_place_between_launches():
    def launcher(x):
        y, z = x.new_empty(x.shape), x.new_zeros(x.shape)
        scale_kernel(x, y, 2.0)
        before = y.clone()
        scale_kernel(x, y, 3.0)
        scale_kernel(before.view(-1), z.view(-1), 1.0)
        return y.sum(0, dtype=torch.float64), before, z

    counted, replayed = _replayed(launcher)
    (x,), (total, before, z) = _ask(replayed, (3, 4))
    assert counted.calls == 2
    assert torch.equal(before, 2 * x)
    assert torch.equal(z, 2 * x)
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, (3 * x).sum(0).double())


FOREIGN = torch.ones(3)


@pytest.mark.parametrize(
    "launcher",
    [
        lambda x: _double(x) if x.sum().item() else x,
        lambda x: x.new_empty(3).copy_(x),
        lambda x: torch.cat([x, x])[:3],
        lambda x: torch.add(x, 1, out=x.new_empty(3)),
        lambda x: x + FOREIGN,
        lambda x: (FOREIGN, x),
        lambda x: [_double(x)],
        lambda x: x.nonzero(),
        lambda x: (scale_kernel(x, y := x.new_empty(3), 1.0, known=False), y)[1:],
    ],
    ids=["item", "write", "list", "out", "foreign", "returned", "no tuple", "values", "unknown"],
)
def test_what_cannot_be_played_is_always_called(launcher):
    counted, replayed = _replayed(launcher)
    for calls in range(1, 6):
        x = torch.randn(3)
        made, expected = replayed(x), launcher(x)
        assert counted.calls == calls
        torch.testing.assert_close(made, expected)


def test_one_tensor_in_two_places_is_no_model_for_two():
    def launcher(x, y):
        return _double(y)

    _, replayed = _replayed(launcher)
    for _ in range(3):
        x = torch.randn(4)
        assert torch.equal(replayed(x, x), 2 * x)
    for _ in range(4):
        x, y = torch.randn(2, 4).unbind()
        assert torch.equal(replayed(x.clone(), y.clone()), 2 * y)


def test_hooks_of_triton_see_each_launch():
    counted, replayed = _replayed(_double)
    _ask(replayed, (4,))
    scale_kernel.pre_run_hooks.append(print)
    try:
        _ask(replayed, (4,), times=2)
        assert counted.calls == 4
    finally:
        scale_kernel.pre_run_hooks.clear()
    _ask(replayed, (4,), times=2)
    assert counted.calls == 4


def test_a_launcher_that_fails_leaves_no_recording():
    fails = [False, True, False, False, False]

    def launcher(x):
        if fails.pop(0):
            raise ValueError("no")
        return _double(x)

    replayed = Replayed(launcher)
    replayed(torch.ones(2))
    with pytest.raises(ValueError, match="no"):
        replayed(torch.ones(2))
    assert _len_torch_dispatch_stack() == 0
    _ask(replayed, (2,), times=5)
    assert len(fails) == 2


def test_recorded_in_inference_mode_played_without():
    _, replayed = _replayed(_double)
    with torch.inference_mode():
        _ask(replayed, (4,), times=3)
    (x,), y = _ask(replayed, (4,), times=1)
    assert not y.is_inference()
    assert torch.equal(y, 2 * x)


def test_calls_of_ever_new_sizes_do_not_add_up(monkeypatch):
    monkeypatch.setattr(launch_tape, "_MOST", 10)
    _, replayed = _replayed(_double)
    for size in range(25):
        replayed(torch.ones(size))
    assert len(replayed._tapes) <= 10


def test_what_is_recorded_keeps_no_tensor_alive():
    _, replayed = _replayed(_double)
    kept = []
    for _ in range(3):
        x = torch.randn(4)
        kept += [weakref.ref(x), weakref.ref(replayed(x))]
    del x
    assert [ref() for ref in kept] == [None] * 6


def test_operators_launch_nothing_that_is_not_reported():
    """Whose launches are not are called directly: by the optimizer, and for messages."""
    unreported = set()
    for path in KERNELS.glob("*.py"):
        module = importlib.import_module(f"torch_fp8.kernels.{path.stem}")
        for kernel in re.findall(r"\b(\w+_kernel)(?:\[|, (?:grid|out),)", path.read_text()):
            if not isinstance(getattr(module, kernel), QuickKernel):
                unreported.add(path.stem)
    assert unreported == {"adamw", "grad_codec", "messages"}
    for path in OPERATORS.glob("*.py"):
        text = path.read_text()
        if "@operator(" in text:
            assert not re.search(rf"kernels(\.| import )({'|'.join(unreported)})\b", text), path
