import dataclasses
import functools
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.internals import E5M2, RECIPES, smoke
from torch_fp8 import Float8Linear
from torch_fp8.ops import refused_rows, rms_norm, swiglu, swiglu_backward

PROCESSES = {
    "fine": "print('what it says'); print('31.5 dB')",
    "wrong": "print('what it says'); raise ValueError('the scale is wrong')",
    "quits": "import sys; sys.exit('I am a host')",
    "crashes": "import ctypes; print('before', flush=True); ctypes.string_at(0)",
    "hangs": "import os, time; open(os.environ['PID'], 'w').write(str(os.getpid()))\n"
    "time.sleep(60)",
}


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """The subjects of PROCESSES; returns the file with the number of the one that hangs."""
    monkeypatch.setattr(smoke, "command", lambda name: [sys.executable, "-c", PROCESSES[name]])
    monkeypatch.setattr(smoke, "child_environment", lambda: {**os.environ, "PID": str(file)})
    file = tmp_path / "pid"
    return file


@pytest.mark.long
def test_a_process_that_fails_turns_its_own_line_red(processes, monkeypatch):
    monkeypatch.setattr(smoke, "LIMIT_S", 5.0)
    results = {result.name: result for result in smoke.smoke(tuple(PROCESSES))}
    statuses = {name: (result.status, result.detail) for name, result in results.items()}
    assert statuses == {
        "fine": ("ok", "31.5 dB"),
        "wrong": ("failed", "ValueError: the scale is wrong"),
        "quits": ("failed", "I am a host"),
        "crashes": ("failed", "its process was ended by SIGSEGV"),
        "hangs": ("failed", "took more than 5 s"),
    }
    assert "what it says" in results["wrong"].log
    assert "Traceback" in results["wrong"].log
    assert "before" in results["crashes"].log
    assert _is_gone(int(processes.read_text()))


def _is_gone(pid):
    for _ in range(100):
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.long
def test_an_interrupt_leaves_no_process_behind(processes):
    def interrupt():
        while not (processes.exists() and processes.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    # Whoever runs the tests may ignore it, as nohup does.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            list(smoke.smoke(["hangs", "fine"]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert _is_gone(int(processes.read_text()))


@pytest.mark.long
def test_the_process_of_a_subject_prints_last_what_it_found_or_its_error():
    frozen, unknown = smoke.smoke(["frozen", "no such recipe"])
    assert frozen.status == "ok"
    assert "a decoded token" in frozen.detail
    assert (unknown.status, unknown.detail[:8]) == ("failed", "ValueErr")
    assert "check_eager" in unknown.log


def test_subjects_are_the_kernels_each_recipe_and_a_frozen_weight():
    assert ("kernels", *RECIPES, "frozen") == smoke.SUBJECTS
    if not torch.cuda.is_available():
        (kernels,) = smoke.smoke(["kernels"])
        assert (kernels.status, kernels.detail) == ("not run", "no card")


@pytest.mark.parametrize("operand", ["input", "grad_output"])
def test_a_gemm_in_the_wrong_format_is_told(operand, monkeypatch):
    """E5M2 where E4M3 is right."""

    def configure(layer, name, config, recipe, emulate):
        spec = getattr(recipe, operand)._replace(format=E5M2)
        a = dataclasses.replace
        if operand == "input":
            recipe = a(recipe, fprop=a(recipe.fprop, a=spec), wgrad=a(recipe.wgrad, b=spec))
        else:
            recipe = a(recipe, dgrad=a(recipe.dgrad, a=spec), wgrad=a(recipe.wgrad, a=spec))
        original(layer, name, config, recipe, emulate)

    original = Float8Linear.configure
    monkeypatch.setattr(Float8Linear, "configure", configure)
    gemm = "fprop" if operand == "input" else "dgrad"
    with pytest.raises(RuntimeError, match=f"{gemm} of 256 tokens .* its floor is 28.0 dB"):
        smoke.check_eager("rowwise")


def test_a_wrong_scale_of_one_row_is_told(monkeypatch):
    """The whole hides one row of 384; its own SQNR does not."""
    original = Float8Linear.forward

    def wrong(self, x):
        y = original(self, x)
        return torch.cat([y[:1] * 1.08, y[1:]])

    monkeypatch.setattr(Float8Linear, "forward", wrong)
    with pytest.raises(RuntimeError, match=r"\(row 2\d"):
        smoke.check_eager("tensorwise")


def test_a_compiled_layer_is_measured():
    assert "dB, aot_eager, emulated" in smoke.check_compiled("tensorwise")


def test_a_break_in_a_compiled_layer_is_told(monkeypatch):
    def forward(self, x):
        torch._dynamo.graph_break("planted")
        return original(self, x)

    original = Float8Linear.forward
    monkeypatch.setattr(Float8Linear, "forward", forward)
    with pytest.raises(RuntimeError, match="graph_break"):
        smoke.check_compiled("tensorwise")


@pytest.mark.parametrize("recipe", [*RECIPES, "frozen"])
def test_a_wrong_output_of_one_token_is_told(recipe, monkeypatch):
    """By 8 %, 22 dB: once in training and once where the token is decoded."""
    assert "a decoded token 2" in smoke.check_eager(recipe)
    original = Float8Linear.forward
    for training, what in ((True, "fprop of 1 tokens"), (False, "a decoded token")):

        def wrong(self, x, training=training):
            y = original(self, x)
            return y * 1.08 if len(x) == 1 and self.training == training else y

        monkeypatch.setattr(Float8Linear, "forward", wrong)
        with pytest.raises(RuntimeError, match=rf"{what} has 2\d\.\d dB.* its floor is 25"):
            smoke.check_eager(recipe)


def test_a_layer_that_does_not_run_in_fp8_fails():
    layer, _ = smoke._layer("rowwise")
    plain = functools.partial(torch.nn.functional.linear, weight=layer.weight)
    with pytest.raises(RuntimeError, match="ran without"):
        smoke._measured(layer, plain, "rowwise", smoke.TOKENS, layer.weight.detach())


def test_sizes_that_a_card_refuses_are_told(monkeypatch):
    monkeypatch.setattr(refused_rows, "padded", {"a size": 128})
    assert "refused sizes of GEMMs that run padded: 1" in smoke.check_eager("frozen")


def on_device(function, index, change, first=0):
    """`function`, one result of which differs on the device, in calls of an even number."""
    calls = itertools.count(first)

    @functools.wraps(function)  # with its reference
    def call(*arguments):
        results = function(*arguments)
        if next(calls) % 2:
            return results
        if isinstance(results, torch.Tensor):
            return change(results)
        return tuple(change(part) if i == index else part for i, part in enumerate(results))

    return call


def one_element(x):
    """Flip the lowest bit of the last element, as a register that nothing has written does."""
    x = x.clone()
    x.view(torch.uint8).view(-1)[-x.element_size()] ^= 1
    return x


FAULTS = [
    ("cast e4m3 tensorwise: .* result 0", smoke, "quantize_2d", 0, one_element),
    ("cast e4m3 tensorwise: .* result 2", smoke, "quantize_2d", 2, one_element),
    ("cast e4m3 rowwise: .* result 3", smoke, "quantize_2d", 3, lambda s: s * 2 if s.dim() else s),
    ("transpose", smoke, "transposed_bytes", 0, one_element),
    ("norm", rms_norm, "rms_norm_quantize_once", 4, lambda rstd: rstd * 1.001),
    ("norm's backward", rms_norm, "rms_norm_backward", 1, lambda grad: grad * 1.1),
    ("SwiGLU", swiglu, "swiglu_quantize", 2, lambda qdata: qdata.roll(1)),
    ("SwiGLU's backward", swiglu_backward, "swiglu_backward", 0, lambda grad: grad * 1.1),
    ("optimizer", smoke, "trained", 0, one_element),
]
ALSO_INPUTS = ("norm",)
"""Kernels whose first call makes an input of the next kernel, on the CPU."""


def test_right_kernels_pass():
    assert smoke.check_kernels("cpu") == "16 calls equal their references"


@pytest.mark.parametrize(
    ("named", "owner", "name", "index", "change"), FAULTS, ids=[f[2] + str(f[3]) for f in FAULTS]
)
def test_a_wrong_kernel_is_told(named, owner, name, index, change, monkeypatch):
    first = -1 if named in ALSO_INPUTS else 0
    wrong = on_device(getattr(owner, name), index, change, first)
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(RuntimeError, match=f"^{named}.* differ"):
        smoke.check_kernels("cpu")


def test_a_result_of_another_form_is_told():
    x = torch.ones(4, 4)
    for got in ([None], [x[:2]], [x.half()]):
        with pytest.raises(RuntimeError, match=r"it: result 0 is .* and its reference"):
            smoke._compare("it", got, [x], False)
